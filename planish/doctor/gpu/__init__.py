"""What a GPU should do and what it does: computed times, and the report of `--gpu-report`."""
