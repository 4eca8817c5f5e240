"""Datasets of questions with known answers, their prompts, and the graders of the answers."""
