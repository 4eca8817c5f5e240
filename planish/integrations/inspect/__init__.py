"""Inspect: models of planish for its tasks, and its tasks for runs of planish."""
