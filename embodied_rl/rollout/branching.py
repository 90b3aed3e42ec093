"""Groups that begin in the middle of an episode of another group.

After a group whose returns differ, further episodes all start from one state that one of its
episodes (the trunk) decided at. Their returns are compared with each other alone, so that what an
advantage tells is about the decisions after that state, not about the whole episode: local
comparisons as of TreeRPO (arXiv:2506.05183) and SPO (arXiv:2505.23564), with whole groups in place
of trees.

Why the advantages are right: the trunk is not a member. Given the state, all members are drawn
alike, each with its own noise, so the others' mean is a baseline that does not depend on a member's
decisions, and the gradient is that of the expected return from the state, as with any other start.
That holds however the state was chosen, from outcomes too. Were the trunk's own rest a member, the
choice of a state before its end would already tell how long it went on. A simulator that only
nearly repeats itself starts the members a little apart, which adds variance but no bias.

Why these states: in a group of failures alone, or of successes alone, a later state is on average
no nearer to a success rate of one half: the expected value along an episode stays what it was at
the start. Along an episode that ended otherwise than most of its group, the success rate must pass
the middle, where comparisons teach most. So the trunk is one of the rarer outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from embodied_rl.rollout.practice import BRANCH, seeded

if TYPE_CHECKING:
    from embodied_rl.contracts import Episode
    from embodied_rl.rollout.batch import EpisodeResult

_LEVEL = 2**40
"""Numbers of planned groups are below this. A branch has its origin's number and this added, so
that it depends on its origin alone, whichever group ends first."""


def branch(results: Sequence[EpisodeResult], group_size: int, seed: int) -> list[Episode]:
    """Episodes of a further group, from the middle of one of these, which are all of one group.

    A function of the seed and the group. None where no episode of the rarer outcome decided more
    than once (before its success, where it went on after that).
    """
    ordered = sorted(results, key=lambda result: result.episode.key)
    group = ordered[0].episode.group
    random = seeded(seed, group, BRANCH)
    trunks = [r for r in _rarer(ordered) if r.path and r.path.decided]
    if not trunks:
        return []
    trunk = trunks[random.integers(len(trunks))]
    path, number = trunk.path, group + _LEVEL
    assert path
    length = path.decided[random.integers(len(path.decided))]
    level, origin = divmod(number, _LEVEL)
    # Simulators take seeds below 2^32.
    seeds = random.integers(2**31, size=group_size)
    return [
        replace(
            trunk.episode,
            key=f"train/branch/{origin:08d}/{level:02d}/{i:04d}",
            seed=int(seeds[i]),
            group=number,
            start="branch",
            prelude=path.prelude(length),
        )
        for i in range(group_size)
    ]


def level_of(group: int) -> int:
    """How many branchings lie between a group and a planned one."""
    return group // _LEVEL


def _rarer(results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    """Those above the mean return or those below, whichever are fewer; of as many, those above."""
    mean = np.mean([result.total_reward for result in results])
    above = [result for result in results if result.total_reward > mean]
    below = [result for result in results if result.total_reward <= mean]
    return above if len(above) <= len(below) else below
