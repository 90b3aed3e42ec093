"""Learned and programmed rewards."""
