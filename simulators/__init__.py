"""Simulators: one file each, built from the options in `simulators.config`."""
