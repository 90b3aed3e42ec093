"""Reinforcement-learning algorithms: one file each."""
