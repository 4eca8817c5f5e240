"""Rollouts: one episode, groups of them, and what they measure."""
