"""What happens inside a chunk, for environments that are stepped one by one.

- A control step after the episode's end is not executed.
- When the task and the time limit end the episode in one step, the task wins.
- Only the chunk's end, the episode's end and the next episode's beginning are observed.
- An ended slot begins the episode that was offered to it, or stays frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from embodied_rl.contracts import CannotLookAhead, Environment, Episode, SimulatorSpec
from embodied_rl.rollout.arrays import Arrays

if TYPE_CHECKING:
    from embodied_rl.contracts import FloatArray

type Kept = dict[int, Mapping[str, FloatArray]]
"""By slot, the state from which chunks are being tried out."""


def require_variations(spec: SimulatorSpec, episode: Episode) -> None:
    """Raise ValueError if the episode varies something that the simulator cannot."""
    unknown = [axis for axis, _ in episode.variations if axis not in spec.variations]
    if unknown:
        known = ", ".join(spec.variations) or "none"
        raise ValueError(f"{spec.task} cannot vary {unknown[0]!r}; what it can vary: {known}")


def begin(environment: Environment, slot: int, episode: Episode, arrays: Arrays) -> str:
    """Start an episode and show its first view; returns its instruction."""
    require_variations(environment.spec, episode)
    length = len(episode.prelude)
    while (over := _play(environment, episode, length)) is not None:
        # Contacts may go a little differently than when the actions were recorded.
        length = over
    arrays["begun_after"][slot] = length
    arrays.show(slot, environment.observe(), "observation")
    return environment.instruction


def _play(environment: Environment, episode: Episode, length: int) -> int | None:
    """Reset and play the first `length` actions of the prelude. If one of them ends the episode,
    returns how many came before it."""
    environment.reset(episode)
    for number, action in enumerate(episode.prelude[:length]):
        outcome = environment.step(np.array(action, dtype=np.float32))
        if outcome.terminated or outcome.truncated:
            return number
    return None


def execute(environment: Environment, slot: int, offered: bool, arrays: Arrays) -> bool:
    """Execute the slot's chunk from `arrays` and write what came of it.

    Returns whether the episode ended; with an episode `offered`, `begin` must then be called.
    """
    actions: FloatArray = arrays["actions"][slot]
    reward = arrays["reward"][slot]
    reward[:] = 0.0
    terminated = truncated = success_once = success = False
    executed = stage = 0
    for action in actions:
        outcome = environment.step(action)
        reward[executed] = outcome.reward
        executed += 1
        success = outcome.success
        success_once |= success
        stage = max(stage, outcome.stage)
        terminated = outcome.terminated
        truncated = outcome.truncated and not terminated
        if terminated or truncated:
            break
    ended = terminated or truncated
    arrays["executed"][slot] = executed
    # The slot may begin another episode before anybody reads this.
    arrays["prelude_steps"][slot] = arrays["begun_after"][slot]
    arrays["terminated"][slot] = terminated
    arrays["truncated"][slot] = truncated
    arrays["success_once"][slot] = success_once
    arrays["success_now"][slot] = success
    arrays["stage"][slot] = stage
    arrays["refilled"][slot] = ended and offered
    if not ended:
        arrays.show(slot, environment.observe(), "observation")
    elif truncated:
        # Only a cut episode's last view is worth something: its value is bootstrapped.
        arrays.show(slot, environment.observe(), "final")
    return ended


def look(environment: Environment, slot: int, arrays: Arrays, kept: Kept) -> None:
    """Execute the slot's chunk from `arrays` and write what came of it, for one of several chunks
    that are tried out from the same state. `go_back` must be called before the chosen one.

    Raises CannotLookAhead if the environment has no snapshots.
    """
    if slot not in kept:
        try:
            kept[slot] = environment.snapshot()
        except NotImplementedError as error:
            text = str(error) or f"{environment.spec.task} gives no snapshots"
            raise CannotLookAhead(text) from None
    # Also before the first: a restored state may lack what no snapshot holds, such as contacts, and
    # all chunks, the chosen one included, must begin in the same state.
    environment.restore(kept[slot])
    execute(environment, slot, False, arrays)


def go_back(environment: Environment, slot: int, kept: Kept) -> None:
    """Return to where the first look began, if there were any."""
    snapshot = kept.pop(slot, None)
    if snapshot is not None:
        environment.restore(snapshot)
