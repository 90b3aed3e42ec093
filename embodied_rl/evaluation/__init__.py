"""Measuring success so that a reviewer would trust it."""
