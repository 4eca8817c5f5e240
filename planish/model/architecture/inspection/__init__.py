"""What planish finds out about a model of transformers before it is loaded."""
