"""Shared test set-up."""

from __future__ import annotations

import torch

# Small networks gain nothing from threads, and threads that wait for each other slow tests down
# many times over when other processes run.
torch.set_num_threads(1)
