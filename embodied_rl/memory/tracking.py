"""Counting bytes: of tensors that live while something is computed, and of processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While in use, counts the bytes of tensors that are made, until nobody holds them any more;
    views count once, with what they look into."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and take note of what it made."""
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self._note(leaf.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size).atexit = False

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peak_of(compute: Callable[[], object], device: str) -> int:
    """Bytes of tensors that `compute` needs at most beside those that were there before."""
    if device == "cpu":
        with LiveBytes() as live:
            compute()
        counted: int = live.peak
        return counted
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before: int = torch.cuda.memory_allocated()
    compute()
    torch.cuda.synchronize()
    most: int = torch.cuda.max_memory_allocated()
    return most - before


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of tensors, those that share their memory once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def process_bytes(pid: int | str = "self") -> Mapping[str, int]:
    """What a process takes: `Rss`, `Pss`, `Private_Dirty`, `Anonymous` and so on, in bytes, as
    Linux counts them; empty where it does not say."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {w[0].rstrip(":"): int(w[1]) * 1024 for w in words if w[-1] == "kB"}


def parent_of(pid: int) -> int:
    """The process that started another one."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))


def data_bytes() -> int:
    """Memory of this process that may be written to, as the limit RLIMIT_DATA counts it; whether it
    is in use or only reserved."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next(line for line in lines if line.startswith("VmData:"))
    return int(found.split()[1]) * 1024
