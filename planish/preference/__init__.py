"""Learning from comparisons: what people, or programs, prefer."""
