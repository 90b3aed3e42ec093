"""The memory of a run, added up by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from embodied_rl.memory.arithmetic import (
    LEROBOT_BYTES,
    MemoryPlan,
    Place,
    gib,
    predict,
)
from embodied_rl.memory.parts import Growing
from round_numbers import DEMONSTRATED, MEASURED, PPO, config

HOST = {"libraries": 10_000, "simulator": 700, "shared arrays": 64}
GRPO = [
    *("algorithm=grpo", "rollout.num_slots=4", "policy.chunk=4", "algorithm.minibatch_size=7"),
    *("algorithm.groups_per_iteration=2", "algorithm.group_size=3", "algorithm.max_refill=1.5"),
]


def planned(*options: str, reinforces: bool = True, **measured: Any) -> MemoryPlan:
    return predict(config(*options), replace(MEASURED, **measured), reinforces)


def parts(place: Place, moment: str) -> dict[str, int]:
    return {name: part.bytes for name, part in place.moments[moment].items()}


def test_a_line_through_two_measurements() -> None:
    assert Growing.through((2, 70), (4, 90)) == Growing(50, 10)
    assert Growing.through((2, 10), (4, 40)) == Growing(0, 15), "nothing is less than nothing"
    assert Growing.through((2, 40), (4, 30)) == Growing(40, 0)
    assert (Growing(50, 10).at(0), Growing(50, 10).at(3)) == (0, 80)


def test_every_moment_of_a_run_that_imitates_and_reinforces() -> None:
    found = planned(*PPO, *DEMONSTRATED)
    host = HOST | {"lerobot": LEROBOT_BYTES}
    # 2 episodes of at most 10 steps, twice, of 20 + 4 bytes; batches of 6: 30 + 6 * 5.
    assert parts(found.process, "imitate") == host | {
        "weights": 1000,
        "gradients": 400,
        "optimiser": 800,
        "average": 400,
        "activations": 60,
        "demonstrations": 960,
    }
    # 4 slots times 3 decisions, each seen three times and kept twice; 2 slots are decided at once.
    assert parts(found.process, "collect") == host | {
        "weights": 1000,
        "gradients": 600,
        "optimiser": 1200,
        "rollout": 12 * (3 * 20 + 2 * 8),
        "activations": 4,
    }
    # 12 decisions in 3 minibatches of 4: 50 + 4 * 10.
    assert parts(found.process, "update") == host | {
        "weights": 1000,
        "gradients": 600,
        "optimiser": 1200,
        "rollout": 12 * 28,
        "activations": 90,
    }
    assert parts(found.process, "evaluate") == host | {
        "weights": 1000,
        "gradients": 600,
        "loading": 2000,
    }
    # 2 workers and 4 environments beside their server, all the time.
    assert found.workers.peak == 100 + 2 * 30 + 4 * 7
    assert found.process.peak_moment == "collect"
    assert found.process.peak == 10_764 + LEROBOT_BYTES + 3716
    assert found.host_peak == found.process.peak + 188
    assert found.gpu is None


def test_options_add_their_own_part() -> None:
    found = planned(
        *PPO,
        *("algorithm.kl_coefficient=0.1", "algorithm.task_gradients=pcgrad", "evaluation.every=1"),
    )
    assert set(found.process.moments) == {"collect", "update", "evaluate"}
    update = parts(found.process, "update")
    assert update["reference"] == 1000
    # Three tasks' gradients one by one, stacked, and the joint one.
    assert update["task gradients"] == 7 * 600
    # The best policy is loaded beside all that learning needs.
    evaluate = parts(found.process, "evaluate")
    assert (evaluate["optimiser"], evaluate["reference"], evaluate["loading"]) == (1200, 1000, 2000)
    assert "lerobot" not in evaluate


def test_groups_are_counted_with_those_that_are_replaced_and_added() -> None:
    # 3 groups tried instead of 2, of 3 episodes of 3 decisions (10 steps by fours).
    found = planned(*GRPO)
    assert found.sizes.decisions == 27
    # In parts of about 7: 4 of them, the largest of 7 rows. Seen once and joined.
    assert parts(found.process, "update")["activations"] == 50 + 70
    assert parts(found.process, "collect")["rollout"] == 27 * (2 * 20 + 2 * 8)
    more = planned(*GRPO, "algorithm.extra_groups=1", "algorithm.branches=2")
    assert more.sizes.decisions == 3 * (3 * 2 + 2 * 2) * 3
    reinforce = planned("algorithm=reinforce", *(o for o in GRPO if o != "algorithm=grpo"))
    assert reinforce.sizes.decisions == 27


@pytest.mark.parametrize(("size", "rows"), [(4, 4), (5, 6), (7, 6), (8, 6), (9, 12), (100, 12)])
def test_the_largest_minibatch(size: int, rows: int) -> None:
    """12 decisions are divided evenly into about as many parts as the size asks for."""
    assert planned(*PPO, f"algorithm.minibatch_size={size}").sizes.at_once == rows


@pytest.mark.parametrize(("most", "rows"), [(1, 1), (3, 3), (4, 4), (5, 4), (11, 6), (12, 12)])
def test_the_largest_micro_batch(most: int, rows: int) -> None:
    """12 decisions in one minibatch, divided evenly into as few parts as allowed."""
    options = ("algorithm.minibatch_size=12", f"algorithm.micro_batch_size={most}")
    assert planned(*PPO, *options).sizes.at_once == rows


def test_micro_batches_of_imitation() -> None:
    found = planned(*PPO, *DEMONSTRATED, "imitation.micro_batch_size=2")
    assert parts(found.process, "imitate")["activations"] == 30 + 2 * 5


def test_imitation_alone() -> None:
    found = planned(*PPO, *DEMONSTRATED, reinforces=False)
    assert set(found.process.moments) == {"imitate", "evaluate"}
    evaluate = parts(found.process, "evaluate")
    assert (evaluate["gradients"], evaluate["loading"]) == (400, 2000)
    assert set(planned(*PPO, *DEMONSTRATED, "iterations=0").process.moments) == {
        "imitate",
        "evaluate",
    }


def test_nothing_is_imitated_with_an_initial_policy() -> None:
    assert "imitate" not in planned(*PPO, *DEMONSTRATED, "initial_policy=x").process.moments


def test_a_gpu_takes_what_learns_and_the_process_what_passes_through() -> None:
    found = planned(*PPO, *DEMONSTRATED, on_gpu=True, context=500, gpu_simulator=77)
    assert found.gpu is not None
    assert parts(found.gpu, "update") == {
        "simulator": 77,
        "weights": 1000,
        "gradients": 600,
        "optimiser": 1200,
        "rollout": 336,
        "activations": 90,
    }
    host = HOST | {"lerobot": LEROBOT_BYTES, "libraries": 10_500}
    # A checkpoint passes through ordinary memory: weights and both moments.
    assert parts(found.process, "update") == host | {"checkpoint": 1000 + 1200}
    assert parts(found.process, "imitate") == host | {"checkpoint": 2200, "demonstrations": 960}
    assert parts(found.process, "collect") == host | {"rollout": 2 * 12 * 20}
    assert parts(found.process, "evaluate") == host | {"loading": 2000}


def test_without_workers_there_are_none() -> None:
    found = planned(*PPO, num_workers=0)
    assert found.workers.peak == 0 and found.host_peak == found.process.peak


def test_as_data() -> None:
    data = planned(*PPO).to_json()
    places = data["places"]
    assert places["training process"]["moments"]["update"]["activations"] == 90
    assert places["training process"]["peak_moment"] == "collect"
    assert places["simulator workers"]["peak"] == 188
    assert data["host_peak"] == places["training process"]["peak"] + 188
    assert data["measured"]["policy"]["update"] == {"fixed": 50, "per_row": 10}
    assert data["sizes"]["at_once"] == 4


def test_bytes_for_a_person() -> None:
    assert [gib(n) for n in (0, 2**20, 1023 * 2**20, 2**30, 5 * 2**29)] == [
        *("0 MiB", "1 MiB", "1023 MiB", "1.0 GiB", "2.5 GiB"),
    ]
