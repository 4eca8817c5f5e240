"""Reading of a Hugging Face config.json: families, and the fields of each part of a model."""
