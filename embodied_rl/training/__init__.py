"""Runs: phases, checkpoints, metrics, reports."""
