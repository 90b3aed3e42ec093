"""Statistics that grow with the data."""

from __future__ import annotations

from torch import Tensor

type Moments = tuple[Tensor, Tensor, Tensor]
"""Mean [S], variance [S] and the number of rows they come from."""


def merge_moments(known: Moments, rows: Tensor) -> Moments:
    """Mean and variance of all rows seen so far and the new rows [N, S] together.

    The parallel form of Chan, Golub and LeVeque (1979); both variances are biased ones.
    """
    mean, variance, count = known
    if len(rows) == 0:
        return known
    new = rows.to(count.dtype)
    total = count + len(rows)
    shift = new.mean(dim=0) - mean
    squares = variance * count + new.var(dim=0, unbiased=False) * len(rows)
    squares = squares + shift.square() * count * len(rows) / total
    return mean + shift * len(rows) / total, squares / total, total
