"""The engine trains LoRA adapters and samples from them, all on one device.

The adapters of many training models share one copy of their base model's weights.
"""
