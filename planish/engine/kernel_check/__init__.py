"""The check of compiled kernels, and the programs that run it as a self-test."""
