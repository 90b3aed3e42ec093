"""Versions of everything that can change a result."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from embodied_rl import __version__


def package_versions() -> dict[str, str]:
    """By package name, those that are installed; torch's says what it was built for."""
    import torch

    found = {"embodied-rl": __version__, "torch": torch.__version__}
    for name in ("mani-skill", "sapien", "gymnasium", "numpy", "mujoco", "lerobot"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
