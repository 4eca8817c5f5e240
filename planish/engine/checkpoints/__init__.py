"""Checkpoints: files on disk, their paths, names and lifetimes."""
