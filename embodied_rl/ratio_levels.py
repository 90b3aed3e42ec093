"""At which levels a policy can compare its decisions: whole chunks, control steps, tokens.

A policy, and the class of its options, say so in `ratio_levels`; most have no tokens.
"""

from __future__ import annotations

from typing import Any

USUAL_LEVELS = ("chunk", "step")
"""Of policies that do not say."""


def refusal(policy: Any, level: str, length_rule: str = "decision") -> str | None:
    """Why a policy, or the options of one, cannot have `algorithm.ratio_level`, or not together
    with this `algorithm.length_normalisation`; None if it can."""
    allowed: tuple[str, ...] = getattr(policy, "ratio_levels", USUAL_LEVELS)
    if level in allowed:
        # Lengths are counted in control steps, which must then have equally many tokens.
        if level == "token" and "step" not in allowed and length_rule != "decision":
            return (
                f"algorithm.length_normalisation={length_rule} with ratio_level=token needs a "
                f"policy whose control steps all have equally many tokens; take "
                f"length_normalisation=decision or ratio_level=chunk"
            )
        return None
    reason = (
        "it has no action tokens"
        if level == "token"
        else "its tokens describe the chunk as a whole"
    )
    return (
        f"algorithm.ratio_level={level} does not fit this policy: {reason}; allowed: "
        f"{', '.join(allowed)}"
    )
