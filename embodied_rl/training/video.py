"""Films of episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from embodied_rl.contracts import Environment, Episode, Observation, Policy, SimulatorSpec

if TYPE_CHECKING:
    from embodied_rl.contracts import ByteArray


def write_video(path: Path, frames: Sequence[ByteArray], frames_per_s: float) -> None:
    """Write uint8 [height, width, 3] frames as an H.264 MP4 that browsers play.

    Odd sizes are padded by one black pixel. Raises ValueError if there are no frames.
    """
    import av

    if not frames:
        raise ValueError(f"{path} would have no frames")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.unfinished")
    height, width = frames[0].shape[:2]
    padding = ((0, height % 2), (0, width % 2), (0, 0))  # H.264 wants even sizes.
    rate = Fraction(frames_per_s).limit_denominator(1000)
    with av.open(str(temporary), "w", format="mp4") as container:
        stream: Any = container.add_stream("h264", rate=rate)
        stream.width, stream.height = width + width % 2, height + height % 2
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(
                np.ascontiguousarray(np.pad(frame, padding)), format="rgb24"
            )
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    temporary.replace(path)


def film_episodes(
    simulator: Any,
    policy: Policy,
    plan: Callable[[SimulatorSpec], Sequence[Episode]],
    folder: Path,
    prefix: str,
) -> list[Path]:
    """Film the episodes planned for the simulator; file names tell how they ended.

    Returns nothing if the simulator cannot draw here.
    """
    environment: Environment = simulator.build_environment()
    try:
        if not environment.spec.can_render:
            return []
        return [_film(environment, policy, e, folder, prefix) for e in plan(environment.spec)]
    finally:
        environment.close()


def _film(
    environment: Environment, policy: Policy, episode: Episode, folder: Path, prefix: str
) -> Path:
    environment.reset(episode)
    generator = torch.Generator().manual_seed(episode.seed)
    frames, success, ended = [environment.render()], False, False
    while not ended:
        decision = policy.act(_observe(environment), generator, "deterministic")
        for action in decision.actions[0].cpu().numpy():
            outcome = environment.step(action)
            frames.append(environment.render())
            success |= outcome.success
            ended = outcome.terminated or outcome.truncated
            if ended:
                break
    how = "success" if success else "failure"
    several = f"_{episode.task}" if environment.spec.tasks else ""
    path = folder / f"{prefix}{several}_state_{episode.initial_state}_{how}.mp4"
    write_video(path, frames, environment.spec.contract.control_hz)
    return path


def _observe(environment: Environment) -> Observation:
    seen = environment.observe()
    return Observation(
        images={name: torch.from_numpy(image)[None] for name, image in seen.images.items()},
        state=torch.from_numpy(seen.state)[None],
        instruction=(environment.instruction,),
    )
