"""Export checkpoints for other programs: PEFT adapters and merged Hugging Face models, each with a
model card.
"""
