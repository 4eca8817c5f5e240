"""One decoder, its weights, and where they come from."""
