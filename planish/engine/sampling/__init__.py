"""Sampling: the sampler schedules requests, prefills prompts and decodes tokens."""
