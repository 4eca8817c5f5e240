"""Signal handling, background threads, and worker processes that can be killed."""
