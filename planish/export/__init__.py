"""Checkpoints for the rest of the field: PEFT adapters and merged Hugging Face models, each with a
model card.
"""
