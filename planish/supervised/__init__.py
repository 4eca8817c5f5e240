"""Supervised training: conversations in, weights and curves out. Start at train.py."""
