"""Parts from outside of this project, as another distribution would bring them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(folder: Path, parts: Mapping[str, Mapping[str, str]], name: str = "outsider") -> None:
    """Make `folder`, once on sys.path, look like an installed distribution with these parts:
    kind -> name -> `module:ConfigClass`."""
    information = folder / f"{name}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for kind, targets in parts.items():
        lines.append(f"[embodied_rl.{kind}]")
        lines += [f"{part} = {target}" for part, target in targets.items()]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")
