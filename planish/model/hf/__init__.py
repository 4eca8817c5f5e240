"""Models that planish has no decoder for: transformers' modelling code with planish's attention,
linears and experts.
"""
