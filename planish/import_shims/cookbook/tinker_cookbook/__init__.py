"""`import tinker_cookbook` is `import planish.cookbook` where this directory is on PYTHONPATH."""

from planish.import_shims import redirect

redirect("tinker_cookbook", "planish.cookbook")
