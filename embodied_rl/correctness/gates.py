"""Running checks one by one and telling in words what each found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: Literal["ok", "warn", "fail"]
    text: str
    """What was found, and what to do if it is not well."""


class Broken(Exception):
    """A promise that is not kept; the text says which, and what to do."""


class Doubtful(Exception):
    """Something that is allowed, but that one should know of."""


type Gate[B] = Callable[[B], str]
"""Looks at a bench and says what it found; raises `Broken` or `Doubtful`."""


def pass_through[B](bench: B, gates: Mapping[str, Gate[B]]) -> list[Finding]:
    """Every gate's finding; one that breaks does not keep the others from running."""
    findings = []
    for name, gate in gates.items():
        try:
            findings.append(Finding(name, "ok", gate(bench)))
        except Doubtful as doubt:
            findings.append(Finding(name, "warn", str(doubt)))
        except Broken as broken:
            findings.append(Finding(name, "fail", str(broken)))
        except Exception as error:
            findings.append(Finding(name, "fail", f"raised {type(error).__name__}: {error}"))
    return findings
