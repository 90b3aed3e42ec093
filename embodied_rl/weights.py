"""Weights by name, against those that a network has."""

from __future__ import annotations

from collections.abc import Mapping

type Shapes = Mapping[str, tuple[int, ...]]

_MOST_NAMED = 5


def misfit(wanted: Shapes, found: Shapes) -> str:
    """What is missing, superfluous or of another shape, in words; empty if all fit."""
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not known" for name in found if name not in wanted]
    problems += [
        f"{name} has shape {list(found[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    more = len(problems) - _MOST_NAMED
    return "; ".join(problems[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
