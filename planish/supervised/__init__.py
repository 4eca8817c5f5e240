"""Supervised training: conversations and comparisons as datums, and what is minimised on them."""
