"""Reinforcement learning on top of the primitives: environments, rollouts, advantages, one training
loop, run files.
"""
