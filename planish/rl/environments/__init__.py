"""Environments, and the datasets that make them."""
