"""A policy on disk: weights, options, contract. Everything needed to use it elsewhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodied_rl import catalogue
from embodied_rl.config import Config
from embodied_rl.contracts import Contract, Policy
from embodied_rl.files import new_folder, write_json
from embodied_rl.versions import package_versions
from embodied_rl.weights import misfit

_WEIGHTS, _DESCRIPTION = "policy.safetensors", "policy.json"


class DamagedPolicy(ValueError):
    """A policy folder whose content does not fit together."""


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy with what was saved beside it."""

    policy: Policy
    config: Config
    contract: Contract
    extra: dict[str, Any]
    """What the saver added, such as the simulator's options under `simulator`."""
    fingerprint: str
    """SHA-256 of the weights: of our file, and of the native ones after it."""


def save_policy(
    policy: Policy, config: Config, folder: Path, extra: dict[str, Any] | None = None
) -> None:
    """Write a policy folder, whole or not at all.

    A policy made from another library's checkpoint has a `native_prefix`: what of its state is
    called so, its `save_native(folder)` writes beside ours, in that library's own files.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(folder) as unfinished:
        weights = {n: t.detach().cpu().contiguous() for n, t in _ours(policy).items()}
        native = _save_native(policy, unfinished)
        save_file(weights, unfinished / _WEIGHTS)
        write_json(
            unfinished / _DESCRIPTION,
            {
                "policy": config.model_dump(mode="json"),
                "architecture": getattr(policy, "architecture", None),
                "contract": policy.contract.to_json(),
                "contract_fingerprint": policy.contract.fingerprint,
                "native_files": native,
                "weights_sha256": _digest(unfinished, native),
                "versions": package_versions(),
                "extra": extra or {},
            },
        )


def policy_in(path: Path) -> Path | None:
    """The policy folder that a path means: itself, or the result of a run's folder."""
    for candidate in (path, path / "policies" / "final", path / "policies" / "start"):
        if (candidate / _DESCRIPTION).is_file():
            return candidate
    return None


def extra_in(folder: Path) -> dict[str, Any]:
    """What was saved beside the policy in a folder, without loading it."""
    extra: dict[str, Any] = _description(folder / _DESCRIPTION)["extra"]
    return extra


def load_policy(folder: Path, device: str = "cpu", options: Config | None = None) -> LoadedPolicy:
    """Read a policy folder. `options` replace the stored ones, as far as the weights fit them: the
    way to change how actions are drawn, such as the noise level, of a trained policy.

    Raises FileNotFoundError if it is none, ContractMismatch if the options speak another convention
    or scale by other statistics, and `DamagedPolicy` if weights are missing, superfluous,
    of another shape, or if any part was changed on disk.
    """
    if not (folder / _DESCRIPTION).is_file() or not (folder / _WEIGHTS).is_file():
        raise FileNotFoundError(
            f"{folder} is not a policy folder: it must hold {_DESCRIPTION} and {_WEIGHTS}. "
            f"A run keeps its policies under RUN/policies/."
        )
    data = _description(folder / _DESCRIPTION)
    native = data.get("native_files", [])
    missing = [name for name in native if not (folder / name).is_file()]
    if missing:
        raise DamagedPolicy(f"{folder} lacks {', '.join(missing[:5])}, which was saved with it")
    digest = _digest(folder, native)
    if digest != data["weights_sha256"]:
        beside = f" or a file of the checkpoint beside it ({', '.join(native)})" if native else ""
        raise DamagedPolicy(
            f"{folder / _WEIGHTS}{beside} was changed or cut off after it was saved"
        )
    contract = Contract.from_json(data["contract"])
    if contract.fingerprint != data["contract_fingerprint"]:
        raise DamagedPolicy(
            f"the contract in {folder / _DESCRIPTION} was changed after it was saved; the policy "
            f"holds for the contract {data['contract_fingerprint']} alone"
        )
    if options is None:
        kind: Any = catalogue.config_class("policy", data["policy"]["type"])
        config: Any = kind.model_validate(data["policy"])
    else:
        config = options
    # What a policy took from elsewhere when it was new: the folder must do without that later on.
    architecture = data.get("architecture")
    policy: Any = (
        config.rebuild(contract, architecture, folder) if architecture else config.build(contract)
    )
    made: Contract = policy.contract
    made.require_equal(contract, "the policy with these options", f"the folder {folder}")
    try:
        weights = load_file(folder / _WEIGHTS)
    except SafetensorError as error:
        raise DamagedPolicy(f"{folder / _WEIGHTS} cannot be read: {error}") from None
    wanted = _ours(policy)
    if options is not None:
        weights = _with_fresh_exploration(policy, weights, wanted)
    problem = misfit(_shapes(wanted), _shapes(weights))
    if problem:
        whose = "its own options" if options is None else f"these options ({_words(config)})"
        raise DamagedPolicy(f"{folder} does not fit {whose}: {problem}")
    # Native weights are there already.
    policy.load_state_dict(weights, strict=not native)
    policy.to(device)
    return LoadedPolicy(policy, config, contract, data["extra"], digest)


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def _ours(policy: Any) -> dict[str, Tensor]:
    """What of a policy's state our own weights file holds."""
    prefix: str | None = getattr(policy, "native_prefix", None)
    state: dict[str, Tensor] = policy.state_dict()
    return {n: t for n, t in state.items() if prefix is None or not n.startswith(prefix)}


def _save_native(policy: Any, folder: Path) -> list[str]:
    """Let a policy write the files of another library; their names in the folder."""
    if getattr(policy, "native_prefix", None) is None:
        return []
    policy.save_native(folder)
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    taken = {_WEIGHTS, _DESCRIPTION} & set(files)
    if taken:
        raise ValueError(f"{type(policy).__name__}.save_native must not write {taken.pop()}")
    return files


def _with_fresh_exploration(
    policy: Any, weights: dict[str, Tensor], wanted: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Weights that only explore are new where the policy explores in another way than before."""
    prefixes: tuple[str, ...] = getattr(policy, "exploration_weights", ())
    if not prefixes:
        return weights
    known = {n: t for n, t in weights.items() if n in wanted or not n.startswith(prefixes)}
    fresh = {n: t for n, t in wanted.items() if n not in known and n.startswith(prefixes)}
    return known | fresh


def _words(config: Config) -> str:
    return ", ".join(f"{name}={value}" for name, value in config.model_dump().items())


def _description(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise DamagedPolicy(f"{path} cannot be read: {error}") from None
    wanted = ("policy", "contract", "contract_fingerprint", "weights_sha256", "extra")
    missing = [name for name in wanted if name not in data]
    if missing:
        raise DamagedPolicy(f"{path} lacks {', '.join(missing)}")
    return data


def _digest(folder: Path, native: list[str]) -> str:
    """Of our weights file, and of the native files after it."""
    digest = hashlib.sha256()
    for name in (_WEIGHTS, *native):
        with (folder / name).open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
