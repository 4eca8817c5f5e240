"""What a base model is, before it is loaded: its config, and its weights' shapes and sizes."""
