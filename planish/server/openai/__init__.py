"""The OpenAI-compatible HTTP endpoints."""
