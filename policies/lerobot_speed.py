"""Compiling the denoising step (`policy.compile`)."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

type Compile = Literal["none", "default", "cuda_graphs"]


def compiled[**P](function: Callable[P, Tensor], how: Compile) -> Callable[P, Tensor]:
    """The function as the option wants it; compiled when it is first called.

    Raises ValueError if this machine cannot do that.
    """
    if how == "none":
        return function
    _require_compiler(how)
    if how == "default":
        made: Callable[P, Tensor] = torch.compile(function)
        return made
    return _replayed(function)


def _replayed[**P](function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Compiled, and replayed as one CUDA graph where no gradient is wanted."""
    replay = torch.compile(function, mode="reduce-overhead")

    def call(*arguments: P.args, **named: P.kwargs) -> Tensor:
        # With gradients, every batch size would keep activations of its own for good.
        if torch.is_grad_enabled():
            return function(*arguments, **named)
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        # The next replay writes over what this one returns.
        return replay(*arguments, **named).clone()

    return call


def _require_compiler(how: Compile) -> None:
    """Raise ValueError naming what is missing for torch.compile."""
    if how == "cuda_graphs" and not torch.cuda.is_available():
        raise ValueError(
            "policy.compile=cuda_graphs needs a CUDA device and there is none; choose "
            "policy.compile=default or none"
        )
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ValueError(
            f"policy.compile={how} needs a C++ compiler, and {compiler} is not on the PATH; "
            f"install one (such as the package g++), name another in CXX, or set "
            f"policy.compile=none"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        raise ValueError(
            f"policy.compile={how} needs Python's headers, and {header} is missing; install them "
            f"(such as the package python3-dev), or set policy.compile=none"
        )
