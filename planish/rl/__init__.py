"""Reinforcement learning: environments, rollouts, advantages, training data and KL terms.

The training loop is planish/training/train_rl.py.
"""
