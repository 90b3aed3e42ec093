"""The line, seen through cameras: a white column stands where the point is."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from embodied_rl.contracts import Camera, Environment, EnvironmentObservation
from line_world import Line, LineConfig


class SeenLineConfig(LineConfig):
    """The line with this many cameras."""

    type: Literal["line", "seen_line"] = "line"  # type: ignore[assignment]

    cameras: int = 1
    gives_images: bool = True

    def build_environment(self) -> Environment:
        return SeenLine(self)


class SeenLine(Line):
    def __init__(self, config: SeenLineConfig) -> None:
        super().__init__(config)
        self._names = [f"camera{number}" for number in range(config.cameras)]
        cameras = tuple(Camera(name, 32, 32) for name in self._names)
        self.spec = replace(self.spec, contract=replace(self.spec.contract, cameras=cameras))

    def observe(self) -> EnvironmentObservation:
        image = np.zeros((32, 32, 3), dtype=np.uint8)
        column = int(np.clip((self.x + 1) * 16, 0, 31))
        image[:, column] = 255
        return EnvironmentObservation(
            {name: np.roll(image, number, axis=1) for number, name in enumerate(self._names)},
            super().observe().state,
        )
