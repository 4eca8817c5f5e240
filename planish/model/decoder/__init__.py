"""The decoder of most families: its layers, its head, and its division among several devices."""
