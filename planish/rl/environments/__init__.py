"""Environments and the data sets that make them."""
