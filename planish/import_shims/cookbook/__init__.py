"""A directory for PYTHONPATH."""
