"""Self-contained pages: one HTML file with its curves, which asks the network for nothing."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

from embodied_rl.files import write_text

COLOUR = "#2f8f79"
"""Of a curve; seen well on a light and a dark page."""

_GREY = "#808890"

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1c2430; --page: #fbfbf9; --line: #d8dad5; --good: #1f6f5c }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ea; --page: #15181c; --line: #343a41; --good: #63c9ac } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 62rem; margin: 0 auto; padding: 2rem 1rem }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin-top: 2.5rem }
.result { font-size: 1.9rem; line-height: 1.3; color: var(--good); font-weight: 600;
  white-space: pre-line }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(18rem, 1fr)); gap: 1.2rem }
figure { margin: 0 } figcaption { font-size: .9rem } svg, video { width: 100%; height: auto }
svg text { fill: var(--ink) }
pre { overflow-x: auto; border: 1px solid var(--line); padding: 1rem; font-size: .85rem }
"""


def write_page(path: Path, title: str, body: str) -> None:
    """Write a page whose body is HTML."""
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<body>{body}</body></html>"
    )
    write_text(path, page)


def new_axes(label: str, is_share: bool) -> tuple[Any, Any]:
    """A small figure and its axes, with a name for x; a share is drawn from 0 to 1, so that a flat
    curve looks flat."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 2.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(label)
    if is_share:
        axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.25)
    axes.patch.set_alpha(0.0)
    axes.tick_params(colors=_GREY)
    axes.xaxis.label.set_color(_GREY)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure, axes


def svg(figure: Any) -> str:
    """A figure as an SVG element."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue().partition("<!DOCTYPE")[2].partition(">")[2].strip()
