"""`import tinker` is `import planish.tinker` where this directory is on PYTHONPATH."""

from planish.import_shims import redirect

redirect("tinker", "planish.tinker")
