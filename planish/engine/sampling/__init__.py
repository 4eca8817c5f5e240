"""Sampling: requests are scheduled, prompts prefilled, tokens decoded."""
