"""Constraints of samples: compiled, and their masks computed, in processes with limits."""
