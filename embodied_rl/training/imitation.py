"""Supervised start: the policy learns to do as the demonstrations did."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from embodied_rl.contracts import Policy
from embodied_rl.run_config import ImitationConfig
from embodied_rl.training.checkpoint import (
    CheckpointStore,
    generator_state,
    optimizer_from_state,
    optimizer_to_state,
    under,
    with_prefix,
)
from embodied_rl.training.demonstrations import Batch, Demonstrations

_LOG_EVERY = 50

_MOST_HELD_OUT = 10_240
"""Frames that the open-loop error is measured on; of a large data set, all would take longer than
training."""

type Log = Callable[[int, dict[str, float]], None]


class NonFiniteImitation(RuntimeError):
    """The loss or a gradient became NaN or infinite."""


@dataclass(frozen=True)
class ImitationResult:
    """How imitation ended; the policy holds the averaged weights."""

    loss: float
    """Mean over the last steps."""
    open_loop_error: float | None
    """Mean absolute difference to held-out demonstrated actions, in action units."""


class Imitation:
    """Trains a policy's `policy_parameters` on demonstrations; can be saved and continued."""

    def __init__(
        self,
        policy: Policy,
        demonstrations: Demonstrations,
        config: ImitationConfig,
        seed: int,
        device: str,
    ) -> None:
        self._policy, self._config, self._device = policy, config, device
        self._chunk: int = getattr(policy, "imitated_steps", policy.chunk)
        self._train, self._held_out = split(demonstrations, config.holdout_share, seed)
        policy.fit_normalisation(
            self._train.observation.state.to(device), self._train.actions.to(device)
        )
        self._parameters = policy.policy_parameters()
        self._average = [parameter.detach().clone() for parameter in self._parameters]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self._rows = torch.Generator().manual_seed(seed)
        self._noise = torch.Generator(device).manual_seed(seed + 1)
        self._step = 0
        self._recent: list[float] = []

    def run(
        self,
        log: Log,
        store: CheckpointStore,
        on_step: Callable[[int, float], None],
        stop: Callable[[], bool],
    ) -> ImitationResult | None:
        """Train to the end, from where `restore` left off. None if it was stopped (and saved)."""
        # Closed at the end, whatever it is: processes that decode pictures end with it.
        with closing(self._batches()) as batches:
            while self._step < self._config.steps:
                values = self._train_step(next(batches))
                on_step(self._step, values["loss"])
                if self._step % _LOG_EVERY == 0:
                    log(self._step, values)
                if stop() or self._step % self._config.checkpoint_every == 0:
                    self.save(store)
                if stop():
                    return None
        for parameter, average in zip(self._parameters, self._average, strict=True):
            parameter.data.copy_(average)
        error = self._open_loop_error()
        if error is not None:
            log(self._step, {"open_loop_error": error})
        return ImitationResult(sum(self._recent) / max(1, len(self._recent)), error)

    def save(self, store: CheckpointStore) -> None:
        """Write a checkpoint from which `restore` continues exactly."""
        moments, numbers = optimizer_to_state(self._optimizer.state_dict())
        averages = {str(i): average for i, average in enumerate(self._average)}
        tensors = with_prefix("policy", self._policy.state_dict())
        tensors |= with_prefix("optimizer", moments) | with_prefix("average", averages)
        tensors["rows"] = generator_state(self._rows)
        tensors["noise"] = generator_state(self._noise)
        state = {"step": self._step, "optimizer": numbers, "recent": self._recent}
        store.save(self._step, tensors, state)

    def restore(self, store: CheckpointStore) -> int:
        """Continue from the newest checkpoint; returns the steps that are done."""
        found = store.latest()
        if found is None:
            return 0
        tensors, state = found
        self._policy.load_state_dict(under(tensors, "policy"))
        self._optimizer.load_state_dict(
            optimizer_from_state(under(tensors, "optimizer"), state["optimizer"])
        )
        for i, average in under(tensors, "average").items():
            self._average[int(i)].copy_(average)
        self._rows.set_state(tensors["rows"])
        self._noise.set_state(tensors["noise"])
        self._step, self._recent = state["step"], state["recent"]
        return self._step

    def _batches(self) -> Generator[Batch]:
        """Random batches without end. Pictures of later ones may be decoded already; the state that
        `save` writes is that after the last one taken, so that the others are then drawn again."""
        ahead = torch.Generator()
        ahead.set_state(self._rows.get_state())
        rows = (self._draw(ahead) for _ in count())
        with closing(self._train.batches(rows, self._chunk)) as batches:
            for batch in batches:
                self._draw(self._rows)
                yield batch

    def _draw(self, generator: torch.Generator) -> Tensor:
        total = len(self._train.actions)
        return torch.randint(total, (min(self._config.batch_size, total),), generator=generator)

    def _train_step(self, batch: Batch) -> dict[str, float]:
        config = self._config
        rate = config.learning_rate * learning_rate_factor(
            self._step, config.warmup_steps, config.steps
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._add_gradients(batch)
        norm = clip_grad_norm_(self._parameters, config.max_grad_norm)
        self._require_finite(loss, norm)
        self._optimizer.step()
        self._step += 1
        _move_average(self._average, self._parameters, config.ema_decay, self._step)
        self._recent = [*self._recent[-99:], float(loss)]
        return {"loss": self._recent[-1], "learning_rate": rate, "grad_norm": float(norm)}

    def _add_gradients(self, batch: Batch) -> Tensor:
        """The loss of a batch, a mean over its control steps, and its gradients: part by part, each
        part adding what its steps are worth."""
        observation, actions, valid = batch
        count, most = len(actions), self._config.micro_batch_size
        total = torch.zeros((), device=self._device)
        for rows in torch.arange(count).tensor_split(1 if most is None else -(-count // most)):
            loss = self._policy.imitation_loss(
                observation.select(rows).to(self._device),
                actions[rows].to(self._device),
                valid[rows].to(self._device),
                self._noise,
            )
            loss = loss * float(valid[rows].sum() / valid.sum().clamp_min(1))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _require_finite(self, loss: Tensor, norm: Tensor) -> None:
        if torch.isfinite(loss) and torch.isfinite(norm):
            return
        named: Any = getattr(self._policy, "named_parameters", dict)
        bad = [
            name
            for name, parameter in dict(named()).items()
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all()
        ]
        raise NonFiniteImitation(
            f"at step {self._step} the loss is {loss.item():g} and the gradient of "
            f"{bad[0] if bad else 'no parameter'} is not finite; lower imitation.learning_rate"
        )

    @torch.no_grad()
    def _open_loop_error(self) -> float | None:
        if self._held_out is None:
            return None
        rows = _spread(len(self._held_out.actions), _MOST_HELD_OUT)
        generator = torch.Generator(self._device).manual_seed(0)
        total, number = 0.0, 0
        # What fits into memory with gradients fits without.
        parts = torch.split(rows, self._config.batch_size)
        for observation, actions, valid in self._held_out.batches(parts, self._policy.chunk):
            decision = self._policy.act(observation.to(self._device), generator, "deterministic")
            difference = (decision.actions.cpu() - actions).abs()[valid]
            total, number = total + float(difference.sum()), number + difference.numel()
        return total / number


def split(
    demonstrations: Demonstrations, holdout_share: float, seed: int
) -> tuple[Demonstrations, Demonstrations | None]:
    """Training and held-out demonstrations, by whole episodes; at least one is trained on."""
    total = demonstrations.num_episodes
    held_out = min(round(total * holdout_share), total - 1)
    if held_out == 0:
        return demonstrations, None
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return demonstrations.subset(order[held_out:]), demonstrations.subset(order[:held_out])


def _spread(total: int, most: int) -> Tensor:
    """All of `total` rows, or `most` of them, evenly spread."""
    return torch.arange(min(total, most)) * total // min(total, most)


def learning_rate_factor(step: int, warmup_steps: int, num_steps: int) -> float:
    """Rises linearly from 0 to 1, then falls to 0 along half a cosine."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


@torch.no_grad()
def _move_average(
    average: list[Tensor], parameters: Sequence[Tensor], decay: float, step: int
) -> None:
    # Early on, a long average would mostly remember the random start.
    share = 1.0 - min(decay, step / (step + 10.0))
    torch._foreach_lerp_(average, [parameter.detach() for parameter in parameters], share)
