"""Bridges to other libraries and services: Inspect, verifiers, OpenAI-compatible endpoints."""
