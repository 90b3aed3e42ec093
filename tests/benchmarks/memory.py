"""Memory of dry runs on the CPU: predicted by `embodied-rl plan` against measured.

    python tests/benchmarks/memory.py

The training process: resident memory, at its largest. Simulator workers and the process that they
are forked from: the sum of their proportional shares (PSS), at its largest, which counts pages that
several share once. The two need not be largest at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from embodied_rl.config import load, save
from embodied_rl.run_config import RunConfig
from embodied_rl.shrunk import shrunk
from outside import install
from seen_line import SeenLine, SeenLineConfig
from tiny_openvla import statistics, write_openvla
from tiny_vla import words_of, write_checkpoint
from watched import watch

LINE = """
simulator: {type: line, gives_images: true}
algorithm: {type: ppo}
rollout: {num_workers: 2}
"""
MANISKILL = """
simulator: {type: maniskill, task: PickCube-v1}
policy: {type: flow_mlp}
algorithm: {type: ppo}
demonstrations: {episodes: 2}
imitation: {steps: 10}
rollout: {num_workers: 2}
"""
SEEN = """
simulator: {type: seen_line}
algorithm: {type: ppo}
rollout: {num_workers: 2}
"""
SMOLVLA = "{type: lerobot_flow, path: FOLDER, tokenizer: WORDS, chunk: 2}"
VLA = (
    "{type: flow_vla, hidden_size: 768, num_heads: 12, num_prefix_layers: 4, num_expert_layers: 4}"
)

CASES = {
    "flow_mlp": LINE + "policy: {type: flow_mlp}\n",
    "flow_vla of 64 million parameters": LINE + f"policy: {VLA}\n",
    "the same with a reference": LINE.replace("ppo}", "ppo, kl_coefficient: 0.1}")
    + f"policy: {VLA}\n",
    "maniskill": MANISKILL,
    "tiny SmolVLA": SEEN
    + "policy: {type: lerobot_flow, path: FOLDER, tokenizer: WORDS, chunk: 2}\n",
    "tiny OpenVLA": SEEN + "policy: {type: openvla, path: FOLDER, chunk: 2}\n",
}


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured bytes of the training process and of the workers."""

    process: tuple[int, int]
    workers: tuple[int, int]

    @property
    def errors(self) -> tuple[float, float, float]:
        """Relative errors: of the process, of the workers, of the sum."""
        both = tuple(a + b for a, b in zip(self.process, self.workers, strict=True))
        pairs = (self.process, self.workers, both)
        first, second, third = (predicted / found - 1 for predicted, found in pairs)
        return first, second, third


def compare(text: str, folder: Path) -> Comparison:
    """Plan and do the dry run of a configuration in an empty folder. Its parts from outside must be
    importable already."""
    file, small = folder / "config.yaml", folder / "small.yaml"
    file.write_text(text)
    options = [f"runs_dir={folder / 'runs'}", "device=cpu"]
    save(shrunk(load(RunConfig, file, options))[0], small)
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    planned = watch(["plan", str(small), "--json"], folder, environment)
    dry = ["train", str(file), *options, "--dry-run", "--force", "--json"]
    done = watch(dry, folder, environment)
    for command in (planned, done):
        if command.code:
            raise RuntimeError(command.output)
    places = json.loads(planned.output)["places"]
    return Comparison(
        (places["training process"]["peak"], done.process),
        (places["simulator workers"]["peak"], done.others),
    )


def with_checkpoint(text: str, folder: Path) -> str:
    """The configuration with a new checkpoint in it, if it wants one."""
    contract = SeenLine(SeenLineConfig()).spec.contract
    path = folder / "checkpoint"
    if "WORDS" in text:
        write_checkpoint("smolvla", path, contract)
        text = text.replace("WORDS", str(words_of(path)))
    elif "FOLDER" in text:
        write_openvla(path, norm_stats={"line": statistics(contract.action_dim)})
    return text.replace("FOLDER", str(path))


def with_lines(folder: Path) -> None:
    """Let the line be found as a simulator from outside, blind and seen."""
    lines = {"line": "line_world:LineConfig", "seen_line": "seen_line:SeenLineConfig"}
    install(folder, {"simulator": lines})
    sys.path.insert(0, str(folder))


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description="predicted and measured memory of dry runs")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    with tempfile.TemporaryDirectory() as outside:
        with_lines(Path(outside))
        for name in parser.parse_args().cases:
            with tempfile.TemporaryDirectory() as folder:
                found = compare(with_checkpoint(CASES[name], Path(folder)), Path(folder))
            mib = [[round(n / 2**20) for n in pair] for pair in (found.process, found.workers)]
            percent = ", ".join(f"{100 * error:+.0f} %" for error in found.errors)
            print(
                f"{name}: process {mib[0][0]} of {mib[0][1]} MiB, workers {mib[1][0]} of "
                f"{mib[1][1]} MiB; process, workers, sum: {percent}",
                flush=True,
            )


if __name__ == "__main__":
    main()
