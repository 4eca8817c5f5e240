"""Images in the input of a model: their decoding, their tokens and positions, and the frozen vision
tower of transformers.
"""
