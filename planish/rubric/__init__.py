"""Answers graded by a model that reads a rubric."""
