"""Success against N, when the best of N candidate chunks is executed (test-time optimisation).

Every N runs the same plan, into a folder of its own, `best_of_N`, whose rows are resumed by keys
that name N. What is compared are the rates on equal initial states.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from embodied_rl.contracts import CannotLookAhead, Episode, Policy, Simulator
from embodied_rl.evaluation.evaluate import EvaluationSummary, evaluate
from embodied_rl.files import write_json
from embodied_rl.page import COLOUR, new_axes, svg, write_page
from embodied_rl.rollout.lookahead import BestOf, Score

ALTERNATIVES = (
    "best-of-N tries candidates out and goes back, which takes a simulator with snapshots: "
    "ManiSkill with simulator.backend=cpu, or a MuJoCo task of gymnasium with "
    "simulator.vectorized=false. Or leave out --best-of"
)


@dataclass(frozen=True)
class Curve:
    """Success against N."""

    task: str
    points: dict[int, EvaluationSummary]
    """By N, in ascending order."""

    @property
    def in_words(self) -> str:
        """A table with a line for each N, and for each of its tasks if there are several."""
        count = next(iter(self.points.values())).episodes
        lines = [
            f"{self.task}: success when the best of N candidates is executed, over the same "
            f"{count} held-out states",
            f"{'N':>4}  {'success [95 % interval]':24}  control steps per episode",
        ]
        for number, summary in self.points.items():
            executed, looked = summary.mean_steps, summary.mean_looked
            lines.append(
                f"{number:4}  {summary.in_words:24}  {executed + looked:.1f} "
                f"({executed:.1f} executed, {looked:.1f} tried out)"
            )
            lines += [f"      {name}: {part.in_words}" for name, part in summary.by_task.items()]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        points = [{"n": number, **summary.to_json()} for number, summary in self.points.items()]
        return {"task": self.task, "best_of": points}


def evaluate_best_of(
    policy: Policy,
    simulator: Simulator,
    episodes: Sequence[Episode],
    numbers: Sequence[int],
    halves: int,
    seed: int,
    score: Score,
    device: str = "cpu",
    output: Path | None = None,
    header: dict[str, Any] | None = None,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> Curve:
    """Run the plan for each N in `numbers`; N = 1 is the plain evaluation.

    `on_progress` is told N, and of it episodes done and successes. With an output folder, each N is
    resumed and written as `evaluate` does it, under `best_of_N`, and the curve as `best_of.json`
    and `best_of.html`. Raises CannotLookAhead before anything is run if the simulator cannot do it.
    """
    if not numbers or min(numbers) < 1:
        raise ValueError(f"numbers of candidates must be at least 1, got {list(numbers)}")
    policy.contract.require_equal(simulator.spec.contract, "the policy", "the simulator")
    if max(numbers) > 1:
        _require_lookahead(simulator, episodes[0], policy.chunk)
    points: dict[int, EvaluationSummary] = {}
    for number in sorted(set(numbers)):

        def note(done: int, successes: int, number: int = number) -> None:
            if on_progress:
                on_progress(number, done, successes)

        points[number] = evaluate(
            policy,
            simulator,
            [replace(e, key=f"{e.key}/best-of-{number}") for e in episodes],
            halves,
            seed,
            device,
            output / f"best_of_{number}" if output else None,
            {**(header or {}), "best_of": number},
            note,
            BestOf(number, score) if number > 1 else None,
        )
    curve = Curve(simulator.spec.task, points)
    if output:
        write_json(output / "best_of.json", {**curve.to_json(), "protocol": header})
        _write_curve(output / "best_of.html", curve)
    return curve


def _require_lookahead(simulator: Simulator, episode: Episode, chunk: int) -> None:
    """Try it once, rather than fail in the middle of a long evaluation."""
    contract = simulator.spec.contract
    low, high = torch.tensor(contract.action_low), torch.tensor(contract.action_high)
    action = torch.zeros(contract.action_dim).clamp(low, high)
    simulator.start([0], [episode])
    try:
        simulator.look([0], action.expand(1, chunk, -1))
    except CannotLookAhead as error:
        raise CannotLookAhead(f"{error}. {ALTERNATIVES}") from None


def _write_curve(path: Path, curve: Curve) -> None:
    numbers, summaries = list(curve.points), list(curve.points.values())
    title = f"{curve.task}: best of N"
    figures = [_figure(curve.task, numbers, summaries)]
    for task in summaries[0].by_task:
        figures.append(_figure(task, numbers, [summary.by_task[task] for summary in summaries]))
    body = (
        f'<h1>{html.escape(title)}</h1><div class="curves">{"".join(figures)}</div>'
        f"<pre>{html.escape(curve.in_words)}</pre>"
    )
    write_page(path, title, body)


def _figure(task: str, numbers: Sequence[int], rates: Sequence[EvaluationSummary]) -> str:
    """Success with its interval against N, on a logarithmic axis."""
    figure, axes = new_axes("candidates N", is_share=True)
    success = [rate.success_once for rate in rates]
    below = [rate.success_once - rate.low for rate in rates]
    above = [rate.high - rate.success_once for rate in rates]
    axes.errorbar(numbers, success, [below, above], color=COLOUR, marker="o", capsize=3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.minorticks_off()
    caption = f"success with its 95 % interval: {task}"
    return f"<figure>{svg(figure)}<figcaption>{html.escape(caption)}</figcaption></figure>"
