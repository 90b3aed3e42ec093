"""Whether a checkpoint of lerobot fits the simulator: chunk, sizes and cameras."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from policies.checkpoints import BadCheckpoint

if TYPE_CHECKING:
    from embodied_rl.contracts import Contract
    from embodied_rl.conventions.config import ConventionConfig


def require_fitting(native: Any, contract: Contract, chunk: int, fitted: bool, path: str) -> None:
    """Chunk and sizes fit; a plain lerobot will be told the simulator's sizes. Statistics that were
    `fitted` here make a checkpoint fit another robot.

    Raises BadCheckpoint naming what does not fit.
    """
    config = native.config
    if chunk > config.chunk_size:
        raise BadCheckpoint(
            f"policy.chunk={chunk} is more than the {config.chunk_size} steps that the "
            f"checkpoint {path} plans; choose at most {config.chunk_size}"
        )
    for what, features, size, most in (
        ("observation.state", config.input_features, contract.state_dim, config.max_state_dim),
        ("action", config.output_features, contract.action_dim, config.max_action_dim),
    ):
        known = features[what].shape[0] if what in features else 0
        if not size or size > most or (known not in (size, most) and not fitted):
            raise BadCheckpoint(
                f"the simulator has {size} entries in {what}, but the checkpoint {path} was "
                f"made for {known} and has room for {most}; choose a checkpoint for this robot "
                f"and controller"
            )
        features[what].shape = (size,)


def cameras_of(
    images: list[str],
    given: Mapping[str, str],
    contract: Contract,
    convention: ConventionConfig | None = None,
) -> dict[str, str]:
    """The simulator's camera for each image of the checkpoint, in the checkpoint's order: as given,
    as the convention knows, with the same names, or all of them in order.

    Raises BadCheckpoint if a name is not known, or if it is not clear which camera is which.
    """
    have = [camera.name for camera in contract.cameras]
    offers = f"the checkpoint has {', '.join(images)}; the simulator {', '.join(have) or 'none'}"
    for key, name in given.items():
        if key not in images or name not in have:
            raise BadCheckpoint(f"policy.cameras names {key}: {name}, but {offers}")
    by_name = {key: key.rpartition(".")[2] for key in images}
    if not given and convention:
        known = {key: convention.cameras.get(name) for key, name in by_name.items()}
        given = {key: name for key, name in known.items() if name in have and name is not None}
    if given:
        return {key: given[key] for key in images if key in given}
    if set(by_name.values()) <= set(have):
        return by_name
    if len(images) != len(have):
        raise BadCheckpoint(
            f"{offers}. Say which is which, such as policy.cameras={{{images[0]}: "
            f"{(have or ['CAMERA'])[0]}}}"
        )
    return dict(zip(images, have, strict=True))
