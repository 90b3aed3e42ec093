"""What is said of a run that does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embodied_rl.config import ConfigError
from embodied_rl.memory.arithmetic import MemoryPlan, predict
from embodied_rl.memory.machine import Machine
from embodied_rl.memory.parts import Growing, WorkerBytes
from embodied_rl.memory.verdict import require_fit, shortages
from embodied_rl.run_config import RunConfig
from round_numbers import DEMONSTRATED, MEASURED, POLICY, PPO, config

GIB = 2**30
HUGE = replace(POLICY, update=Growing(GIB, GIB))
ROOMY = Machine(100 * GIB, 100 * GIB, None)


def given(*options: str, **measured: object) -> tuple[RunConfig, MemoryPlan]:
    run = config(*PPO, *options)
    changes = {"policy": HUGE, **measured}
    return run, predict(run, replace(MEASURED, **changes))  # type: ignore[arg-type]


def refusal(run: RunConfig, plan: MemoryPlan, machine: Machine) -> str:
    with pytest.raises(ConfigError) as caught:
        require_fit(run, plan, machine)
    return str(caught.value)


def test_what_fits_passes() -> None:
    run, plan = given()
    require_fit(run, plan, ROOMY)
    exact = Machine(plan.host_peak, MEASURED.arrays, None)
    require_fit(run, plan, exact)
    assert [one.where for one in shortages(plan, replace(exact, host=plan.host_peak - 1))] == [
        "memory"
    ]


def test_ordinary_memory_with_the_batch_that_would_fit() -> None:
    run, plan = given()
    # A GiB and one per row of 4: 5 in all, and a little beside.
    text = refusal(run, plan, replace(ROOMY, host=4 * GIB + GIB // 2))
    assert "this run does not fit:" in text
    assert "it needs about 5.0 GiB of memory (most of it to update), and 4.5 GiB are free" in text
    assert "activations take 5.0 GiB: change algorithm.micro_batch_size" in text
    assert "algorithm.micro_batch_size=3 would fit there" in text
    assert text.endswith("or go on all the same with --force")


def test_no_batch_is_proposed_where_none_would_do() -> None:
    run, plan = given()
    assert "would fit" not in refusal(run, plan, replace(ROOMY, host=GIB))


def test_only_options_that_the_run_has_are_named() -> None:
    large = replace(POLICY, observation=GIB)
    run, plan = given(policy=large)
    text = refusal(run, plan, replace(ROOMY, host=GIB))
    assert (
        "rollout take 36.0 GiB: change rollout.num_slots, algorithm.decisions_per_iteration;"
        in text
    )
    assert "group" not in text


def test_imitation_has_its_own_batch() -> None:
    large = replace(POLICY, imitation=Growing(0, GIB))
    run, plan = given(*DEMONSTRATED, policy=large)
    text = refusal(run, plan, replace(ROOMY, host=5 * GIB))
    assert "(most of it to imitate)" in text
    assert "activations take 6.0 GiB: change imitation.micro_batch_size" in text
    assert "imitation.micro_batch_size=4 would fit there" in text


def test_workers() -> None:
    run, plan = given(workers=WorkerBytes(0, GIB, GIB))
    text = refusal(run, plan, replace(ROOMY, host=2 * GIB))
    assert "workers take 6.0 GiB: change rollout.num_workers, rollout.num_slots" in text


def test_the_gpu_and_shared_memory_are_told_as_well() -> None:
    run, plan = given(on_gpu=True, arrays=3 * GIB)
    text = refusal(run, plan, Machine(100 * GIB, 2 * GIB, 4 * GIB + GIB // 2))
    assert "5.0 GiB of GPU memory (most of it to update), and 4.5 GiB are free" in text
    assert "algorithm.micro_batch_size=3 would fit there" in text
    assert "3.0 GiB of shared memory (most of it to all the time)" not in text
    assert "3.0 GiB of shared memory, and 2.0 GiB are free" in text
    assert "change rollout.num_slots, simulator.image_size, /dev/shm" in text
