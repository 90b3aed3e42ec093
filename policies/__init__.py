"""Policies: one file each, built from the options in `policies.config`."""
