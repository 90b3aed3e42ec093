"""`report.html`: one file that shows a run, finished or not, and asks the network for nothing."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied_rl.page import COLOUR, new_axes, svg, write_page
from embodied_rl.training.metrics import read

_LARGEST_VIDEO_BYTES = 8 * 2**20

_CURVES: tuple[tuple[str, str, str], ...] = (
    ("rl", "success_rate", "success rate of training episodes"),
    ("evaluation", "success_once", "success on quick-check states"),
    ("imitation", "loss", "imitation loss"),
    ("rl", "approx_kl", "KL divergence per iteration"),
    ("rl", "clip_fraction", "share of clipped ratios"),
    ("rl", "value_loss", "value loss"),
    ("rl", "explained_variance", "explained variance of the value"),
    ("rl", "episode_steps", "control steps per episode"),
    ("rl", "steps_per_s", "control steps per second"),
    ("rl", "percent_wait", "share of time waiting for simulation, %"),
)

_SHARES = ("success_rate", "success_once")
"""Curves drawn from 0 to 1, so that a flat one looks flat."""


def write_report(run: Path) -> Path:
    """Write the report of a run's folder; FileNotFoundError if it is not one."""
    if not (run / "config.yaml").is_file():
        raise FileNotFoundError(f"{run} is not a run's folder: it has no config.yaml")
    result = _read_json(run / "result.json")
    entries = read(run)
    parts = [
        f"<h1>{html.escape(run.name)}</h1>",
        f'<p class="result">{html.escape(_headline(result, entries))}</p>',
        f"<p>{html.escape(_cost(result))}</p>" if result else "",
        f"<p>{html.escape(_remarks(entries))}</p>",
        "<h2>Curves</h2>",
        f'<div class="curves">{"".join(_figures(entries))}</div>',
        _videos(run),
        f"<h2>Versions</h2><p>{html.escape(_versions(run))}</p>",
        "<h2>Configuration</h2>",
        f"<pre>{html.escape((run / 'config.yaml').read_text())}</pre>",
    ]
    path = run / "report.html"
    write_page(path, run.name, "".join(parts))
    return path


def _headline(result: dict[str, Any], entries: Sequence[dict[str, Any]]) -> str:
    if "line" in result:
        return str(result["line"])
    phases = [entry["phase"] for entry in entries]
    return f"not finished; last phase: {phases[-1] if phases else 'none yet'}"


def _cost(result: dict[str, Any]) -> str:
    since = " since it was last resumed" if result.get("resumed") else ""
    return (
        f"{result.get('env_steps', 0):,} control steps of reinforcement learning, "
        f"{result.get('wall_s', 0):.0f} s of wall time{since}, seed {result.get('seed', '?')}"
    )


def _remarks(entries: Sequence[dict[str, Any]]) -> str:
    """What a curve of one point or of four shares would not show well."""
    latest: dict[str, float] = {}
    for entry in entries:
        latest |= {n: v for n, v in entry["values"].items() if v is not None}
    remarks = []
    if "open_loop_error" in latest:
        remarks.append(f"Open-loop action error after imitation: {latest['open_loop_error']:.3g}.")
    shares = [
        f"{name} {latest[f'percent_{name}']:.0f} %"
        for name in ("infer", "wait", "learn", "other")
        if f"percent_{name}" in latest
    ]
    if shares:
        remarks.append(f"Time of the last iteration: {', '.join(shares)}.")
    return " ".join(remarks)


def _versions(run: Path) -> str:
    """Of the packages that wrote the run's newest policy."""
    for name in ("final", "start"):
        found = _read_json(run / "policies" / name / "policy.json").get("versions")
        if found:
            return ", ".join(f"{package} {version}" for package, version in found.items())
    return "no policy is saved yet"


def _figures(entries: Sequence[dict[str, Any]]) -> list[str]:
    figures = []
    for phase, name, title in _curves(entries):
        points = [
            (entry["step"], entry["values"][name])
            for entry in entries
            if entry["phase"] == phase
            and entry["values"].get(name) is not None
            and entry.get("label", "quick") == "quick"
        ]
        if len(points) > 1:
            label = "step" if phase == "imitation" else "iteration"
            curve = _svg(points, label, name.partition("/")[0] in _SHARES)
            figures.append(f"<figure>{curve}<figcaption>{html.escape(title)}</figcaption></figure>")
    return figures


def _curves(entries: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """The curves to draw; success also of each task, where there are several."""
    logged = {(entry["phase"], name) for entry in entries for name in entry["values"]}
    curves = []
    for phase, name, title in _CURVES:
        curves.append((phase, name, title))
        parts = sorted(part for where, part in logged if where == phase and "/" in part)
        of_this = [part for part in parts if part.startswith(f"{name}/")]
        curves += [(phase, part, f"{title}: {part.partition('/')[2]}") for part in of_this]
    return curves


def _svg(points: Sequence[tuple[int, float]], label: str, is_share: bool) -> str:
    figure, axes = new_axes(label, is_share)
    axes.plot([x for x, _ in points], [y for _, y in points], color=COLOUR, linewidth=1.6)
    return svg(figure)


def _videos(run: Path) -> str:
    found = sorted((run / "videos").glob("*.mp4"))
    small = [path for path in found if path.stat().st_size <= _LARGEST_VIDEO_BYTES]
    if not small:
        return ""
    figures = []
    for path in small:
        data = base64.b64encode(path.read_bytes()).decode()
        figures.append(
            f'<figure><video controls muted loop playsinline src="data:video/mp4;base64,{data}">'
            f"</video><figcaption>{html.escape(path.stem)}</figcaption></figure>"
        )
    return f'<h2>Episodes</h2><div class="curves">{"".join(figures)}</div>'


def _read_json(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return data
