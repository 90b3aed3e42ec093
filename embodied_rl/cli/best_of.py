"""`embodied-rl evaluate --best-of`: success against the number of candidates."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from embodied_rl.config import ConfigError

if TYPE_CHECKING:
    from embodied_rl.contracts import Episode, Simulator
    from embodied_rl.training.policy_folder import LoadedPolicy

_USUAL_DISCOUNT = 0.99
"""For policies of which it is not known."""


def number(text: str) -> int:
    """A number of candidates on the command line."""
    try:
        return int(text)
    except ValueError:
        hint = "; put key=value before --best-of" if "=" in text else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number{hint}") from None


def check(numbers: Sequence[int], simulator: Any) -> None:
    """Raise ConfigError before anything is built."""
    if min(numbers) < 1:
        raise ConfigError(f"--best-of must be at least 1, got {min(numbers)}")
    if max(numbers) > 1 and simulator.batched:
        from embodied_rl.evaluation.best_of import ALTERNATIVES

        raise ConfigError(f"this simulator runs as one batch; {ALTERNATIVES}")


def run(
    given: argparse.Namespace,
    loaded: LoadedPolicy,
    simulator: Simulator,
    plan: list[Episode],
    halves: int,
    device: str,
    header: dict[str, Any],
) -> tuple[str, Any]:
    """Evaluate for each N."""
    from embodied_rl.evaluation.best_of import evaluate_best_of
    from embodied_rl.rollout.lookahead import reward_and_value
    from embodied_rl.training.progress import ProgressLine

    numbers = sorted(set(given.best_of))
    discount, warning = _value_discount(loaded.extra)
    warnings = [warning] if warning and numbers[-1] > 1 else []
    for text in warnings:
        print(f"warning: {text}", file=sys.stderr, flush=True)
    header = {**header, "score": "reward and value", "discount": discount}
    with ProgressLine("evaluate", len(numbers) * len(plan)) as progress:

        def show(number: int, done: int, successes: int) -> None:
            before = numbers.index(number) * len(plan)
            progress.update(before + done, f"best of {number}: {successes} successes")

        curve = evaluate_best_of(
            loaded.policy,
            simulator,
            plan,
            numbers,
            halves,
            given.seed,
            reward_and_value(loaded.policy, discount, device),
            device,
            given.output,
            header,
            show,
        )
    lines = [curve.in_words]
    for point in curve.points.values():
        lines += [f"error in {key}: {text}" for key, text in point.errors.items()]
    if given.output:
        lines.append(f"the curve is in {given.output / 'best_of.html'}")
    return "\n".join(lines), curve.to_json() | {"protocol": header, "warnings": warnings}


def _value_discount(extra: dict[str, Any]) -> tuple[float, str | None]:
    """The discount of the policy's value, and a warning if the value may be worth nothing."""
    if "value_discount" not in extra:
        return _USUAL_DISCOUNT, (
            "the policy's folder does not say whether its value was trained; candidates are judged "
            f"by it all the same, with a discount of {_USUAL_DISCOUNT} per control step"
        )
    discount = extra["value_discount"]
    if discount is None:
        return _USUAL_DISCOUNT, (
            "this policy's value estimates no return: imitation, grpo and reinforce do not train "
            "it, and value_normalisation=popart trains it on a scale of its own. Candidates "
            "without a success are told apart by chance. Evaluate a policy that ppo trained"
        )
    return float(discount), None
