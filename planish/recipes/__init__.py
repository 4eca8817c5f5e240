"""Programs that a person runs: `python -m planish.recipes.NAME key=value ...`."""
