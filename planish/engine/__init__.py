"""The engine: one owner of a device that trains adapters and samples from them, many tenants on one
base model.
"""
