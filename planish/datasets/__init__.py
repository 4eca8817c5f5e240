"""Questions with known answers: data sets of them, how they are put to a model, and whether an
answer is right.
"""
