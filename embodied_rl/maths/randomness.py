"""Random numbers from one generator for a batch, or from one per row.

With one generator per row, a row's numbers do not depend on what else is in the batch: an episode
then goes the same whatever the number of slots or workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from embodied_rl.contracts import Randomness


def standard_normal(
    shape: Sequence[int], randomness: Randomness, device: torch.device | str = "cpu"
) -> Tensor:
    """Standard normal numbers, float32, of a shape whose first dimension is the batch."""
    if isinstance(randomness, torch.Generator):
        drawn = torch.randn(*shape, generator=randomness, device=randomness.device)
    else:
        _require_one_per_row(shape, randomness)
        rows = [torch.randn(*shape[1:], generator=g, device=g.device) for g in randomness]
        drawn = torch.stack(rows)
    return drawn.to(device)


def uniform_numbers(
    shape: Sequence[int], randomness: Randomness, device: torch.device | str = "cpu"
) -> Tensor:
    """Numbers in [0, 1), float32, of a shape whose first dimension is the batch."""
    if isinstance(randomness, torch.Generator):
        drawn = torch.rand(*shape, generator=randomness, device=randomness.device)
    else:
        _require_one_per_row(shape, randomness)
        rows = [torch.rand(*shape[1:], generator=g, device=g.device) for g in randomness]
        drawn = torch.stack(rows)
    return drawn.to(device)


def uniform_integers(
    end: int, batch: int, randomness: Randomness, device: torch.device | str = "cpu"
) -> Tensor:
    """int64 [batch] from 0 to end - 1, each equally likely."""
    if isinstance(randomness, torch.Generator):
        drawn = torch.randint(end, (batch,), generator=randomness, device=randomness.device)
    else:
        _require_one_per_row((batch,), randomness)
        rows = [torch.randint(end, (), generator=g, device=g.device) for g in randomness]
        drawn = torch.stack(rows)
    return drawn.to(device)


def _require_one_per_row(shape: Sequence[int], generators: Sequence[torch.Generator]) -> None:
    if len(generators) != shape[0]:
        raise ValueError(f"got {len(generators)} generators for a batch of {shape[0]} rows")
