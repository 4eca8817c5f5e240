"""Learning from comparisons: which of two answers a person, a model or a program prefers."""
