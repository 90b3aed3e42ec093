"""One ratio per chunk, per control step or per action token, and policies that lack one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.algorithms.config import GRPOConfig, PPOConfig
from embodied_rl.algorithms.steps import ratios
from embodied_rl.config import ConfigError, load
from embodied_rl.maths.losses import token_mask
from embodied_rl.rollout.batch import Batch
from embodied_rl.rollout.build import build_simulator
from embodied_rl.rollout.planner import TrainingPlanner
from embodied_rl.run_config import RolloutConfig, RunConfig
from line_world import LineConfig
from policies.config import FastVLAConfig, FlowMLPConfig, GaussianMLPConfig, TokenVLAConfig

TOKENS = TokenVLAConfig(hidden_size=16, chunk=4, num_bins=8, max_instruction_bytes=24)
FAST = FastVLAConfig(hidden_size=16, chunk=4, vocabulary=64, max_instruction_bytes=24)
LEVELS = ["chunk", "step", "token"]
PPO = {"type": "ppo", "decisions_per_iteration": 4, "critic_warmup_iterations": 0}
GRPO = {"type": "grpo", "groups_per_iteration": 3, "group_size": 4}


def trained(policy: Any, algorithm: dict[str, Any], **options: Any) -> tuple[Any, Batch]:
    """An algorithm and what it collected on the line, in which episodes end within chunks."""
    rollout = RolloutConfig(num_slots=4, halves=2, num_workers=0)
    simulator = build_simulator(LineConfig(), rollout, chunk=policy.chunk)
    torch.manual_seed(0)
    kind: Any = PPOConfig if algorithm["type"] == "ppo" else GRPOConfig
    built = policy.build(simulator.spec.contract)
    made = kind(**(algorithm | options)).build(built, 0)
    planner = TrainingPlanner("line", 0, None, made.group_size)
    generator = torch.Generator().manual_seed(0)
    return made, made.collector(simulator, planner, generator, 2).collect()


@pytest.mark.parametrize("algorithm", [PPO, GRPO], ids=lambda options: options["type"])
def test_collectors_keep_the_tokens_that_add_up_to_the_steps(algorithm: dict[str, Any]) -> None:
    _, batch = trained(TOKENS, algorithm)
    assert batch.token_log_prob is not None
    # One action dimension: the tokens are the steps.
    assert torch.equal(batch.token_log_prob, batch.log_prob)
    _, without = trained(GaussianMLPConfig(chunk=4, hidden_size=8), algorithm)
    assert without.token_log_prob is None


@pytest.mark.parametrize("algorithm", [PPO, GRPO], ids=lambda options: options["type"])
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_starts_at_ratio_one_and_learns(algorithm: dict[str, Any], level: str) -> None:
    made, batch = trained(TOKENS, algorithm, ratio_level=level)
    before = [p.detach().clone() for p in made.policy.policy_parameters()]
    values = made.update(batch, 0)
    assert values["first_log_ratio"] < 1e-3
    now = made.policy.policy_parameters()
    assert not all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_levels_agree_by_summation() -> None:
    made, batch = trained(TOKENS, PPO)
    rows = torch.arange(len(batch.value))
    batch.log_prob.copy_(torch.randn(batch.log_prob.shape))
    assert batch.token_log_prob is not None
    batch.token_log_prob.copy_(batch.log_prob)
    seen = made.policy.evaluate(batch.observation, batch.trace)
    by_level = {level: ratios(seen, batch, rows, batch.executed[rows], level) for level in LEVELS}  # type: ignore[arg-type]
    chunk, step, token = (by_level[level][0] for level in LEVELS)
    assert (batch.executed < 4).any()
    assert torch.allclose(token.sum(1), chunk, atol=1e-5)
    assert torch.allclose(step.sum(1), chunk, atol=1e-5)
    assert seen.token_step is not None
    assert torch.equal(by_level["token"][1], token_mask(seen.token_step, batch.executed))
    assert by_level["token"][1].sum() == batch.executed.sum()


@pytest.mark.parametrize("algorithm", [PPO, GRPO], ids=lambda options: options["type"])
def test_a_policy_without_tokens_is_refused_when_the_algorithm_is_made(
    algorithm: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match=r"ratio_level=token does not fit.*allowed: chunk, step"):
        trained(FlowMLPConfig(hidden_size=16), algorithm, ratio_level="token")


def test_a_run_is_refused_before_it_begins(tmp_path: Path) -> None:
    overrides = [
        "simulator=gymnasium",
        "policy=gaussian_mlp",
        "algorithm=ppo",
        "algorithm.ratio_level=token",
        f"runs_dir={tmp_path}",
    ]
    with pytest.raises(ConfigError, match=r"no action tokens; allowed: chunk, step"):
        load(RunConfig, None, overrides)
    overrides[1] = "policy=token_vla"
    assert load(RunConfig, None, overrides).algorithm.ratio_level == "token"  # type: ignore[attr-defined]


@pytest.mark.parametrize("algorithm", [PPO, GRPO], ids=lambda options: options["type"])
@pytest.mark.parametrize("level", ["chunk", "token"])
def test_fast_tokens_learn_at_the_levels_that_they_have(
    algorithm: dict[str, Any], level: str
) -> None:
    made, batch = trained(FAST, algorithm, ratio_level=level)
    assert made.update(batch, 0)["first_log_ratio"] < 1e-3
    # Every token counts in step 0, so that none is lost where a chunk was cut short.
    rows = batch.valid.nonzero()[:, 0]
    seen = made.policy.evaluate(
        batch.observation.select(rows), {name: t[rows] for name, t in batch.trace.items()}
    )
    _, mask = ratios(seen, batch, rows, batch.executed[rows], "token")
    assert torch.equal(mask, batch.trace["words"][rows] >= 0)
    with pytest.raises(ValueError, match=r"ratio_level=step.*allowed: chunk, token"):
        trained(FAST, algorithm, ratio_level="step")


@pytest.mark.parametrize("rule", ["episode", "constant"])
def test_lengths_are_not_counted_in_tokens_of_no_step(rule: str) -> None:
    with pytest.raises(ValueError, match=f"length_normalisation={rule} with ratio_level=token"):
        trained(FAST, GRPO, ratio_level="token", length_normalisation=rule)
    made, batch = trained(TOKENS, GRPO, ratio_level="token", length_normalisation=rule)
    weight = made.advantages(batch)
    assert made.update(batch, 0)["num_updates"] > 0 and weight.isfinite().all()


def test_a_reference_is_annealed_with_its_policy() -> None:
    """The same weights are no distance apart, however much noise is left."""
    flow = FlowMLPConfig(chunk=4, hidden_size=16, exploration="flow_noise", final_noise=0.3)
    made, batch = trained(flow, PPO, kl_coefficient=0.1)
    for share in (0.0, 1.0):
        made.policy.set_progress(share)
        made.set_progress(share)
        seen = made.policy.evaluate(batch.observation, batch.trace).log_prob
        assert torch.equal(made.reference.log_prob(batch.observation, batch.trace), seen.detach())


def test_what_was_drawn_stays_possible_under_a_cut_off() -> None:
    """After large steps, log-ratios and the distance to the reference are finite."""
    cut = TOKENS.model_copy(update={"top_k": 3, "top_p": 0.9})
    made, batch = trained(cut, PPO, kl_coefficient=0.1, learning_rate=1e-2, max_kl=None)
    assert batch.trace["kept"].sum(-1).max() <= 3
    values = made.update(batch, 0)
    rows = batch.valid.nonzero()[:, 0]
    seen = made.policy.evaluate(batch.observation, batch.trace)
    assert ratios(seen, batch, rows, batch.executed[rows], "chunk")[0].isfinite().all()
    assert 0 < values["kl_to_reference"] < 100
