"""What a policy learns from recorded decisions, and what that keeps in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodied_rl.contracts import Observation


def learned(policy: Any, seen: Observation, trace: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the score of recorded decisions, by name."""
    policy.zero_grad()
    scored = policy.evaluate(seen, trace)
    (scored.log_prob.sum() + scored.value.sum()).backward()
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


def kept_bytes(policy: Any, seen: Observation, trace: dict[str, Tensor]) -> int:
    """Bytes that are kept for the gradient of a score, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scored = policy.evaluate(seen, trace)
    del scored
    return sum(kept.values())
