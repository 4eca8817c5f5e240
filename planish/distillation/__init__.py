"""Distillation: a student learns a teacher's token probabilities.

The student learns on its own samples (on-policy), on given answers (off-policy), or from answers to
a longer prompt that only the teacher gets (prompt distillation).
"""
