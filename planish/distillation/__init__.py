"""A student learns from what a teacher finds likely: on its own samples, on given answers, or
without a prompt that the teacher had.
"""
