"""Reinforcement learning for robot policies that were pretrained by imitation."""

__version__ = "0.1.0"
