"""Names of the built-in parts, and how a name becomes the class of its options.

A part is imported only when a run asks for it, so `import embodied_rl` needs no simulator. A part
from outside is an entry point in the group `embodied_rl.<kind>` whose value is its config class.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

PARTS: dict[str, dict[str, str]] = {
    "simulator": {
        "maniskill": "simulators.config:ManiSkillConfig",
        "gymnasium": "simulators.config:GymnasiumConfig",
    },
    "policy": {
        "flow_mlp": "policies.config:FlowMLPConfig",
        "flow_vla": "policies.config:FlowVLAConfig",
        "token_vla": "policies.config:TokenVLAConfig",
        "fast_vla": "policies.config:FastVLAConfig",
        "lerobot_flow": "policies.lerobot_config:LerobotFlowConfig",
        "lerobot_tokens": "policies.lerobot_config:LerobotTokensConfig",
        "openvla": "policies.openvla_config:OpenVLAConfig",
        "openvla_oft": "policies.openvla_config:OpenVLAOFTConfig",
        "gaussian_mlp": "policies.config:GaussianMLPConfig",
    },
    "algorithm": {
        "ppo": "embodied_rl.algorithms.config:PPOConfig",
        "grpo": "embodied_rl.algorithms.config:GRPOConfig",
        "reinforce": "embodied_rl.algorithms.config:REINFORCEConfig",
    },
}

_ROOT = Path(__file__).resolve().parent.parent


class UnknownPart(ValueError):
    """A part that is neither built in nor installed."""


def names(kind: str) -> list[str]:
    """All parts of a kind that can be named in a configuration, those from outside included."""
    return sorted({*PARTS[kind], *(entry.name for entry in entry_points(group=_group(kind)))})


def config_class(kind: str, name: str) -> Any:
    """The config class registered under a name.

    Raises `UnknownPart` with the known names, and `ImportError` if a foreign package hides ours.
    """
    target = PARTS[kind].get(name)
    if target is not None:
        return load(target)
    for entry in entry_points(group=_group(kind), name=name):
        return entry.load()
    raise UnknownPart(f"no {kind} is called {name!r}; known: {', '.join(names(kind))}")


def load(target: str) -> Any:
    """Import `module:Attribute` from this project, and make sure that it is this project's."""
    module_name, _, attribute = target.partition(":")
    top = module_name.partition(".")[0]
    spec = importlib.util.find_spec(top)
    found = Path((spec and spec.origin) or "nothing").resolve()
    if found.parent.parent != _ROOT:
        raise ImportError(
            f"'{top}' is {found}, not the one that ships with embodied-rl ({_ROOT / top}). A file "
            f"or folder of that name comes first on sys.path: rename it, run the 'embodied-rl' "
            f"command, or start Python with -P."
        )
    return getattr(importlib.import_module(module_name), attribute)


def _group(kind: str) -> str:
    return f"embodied_rl.{kind}"
