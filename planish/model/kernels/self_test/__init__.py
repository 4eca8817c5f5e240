"""Self-tests of compiled kernels in a process of their own, and their stored verdicts."""
