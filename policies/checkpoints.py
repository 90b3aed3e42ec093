"""Checkpoints of other libraries: finding them, and refusing what cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class BadCheckpoint(ValueError):
    """A checkpoint that cannot be used; the text says why and what to do."""


def local_folder(path: str, wanted: Sequence[str]) -> Path:
    """The local folder of a checkpoint. If `path` names one on the Hugging Face Hub, its files that
    match `wanted` are downloaded. Raises BadCheckpoint."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists() or path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise BadCheckpoint(f"policy.path={path} is no folder; give one with a checkpoint")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=[*wanted]))
    except Exception as error:
        raise BadCheckpoint(
            f"policy.path={path} is no folder here and cannot be fetched from the Hugging Face Hub "
            f"({type(error).__name__}); go online, or download it elsewhere and give its folder"
        ) from error


def pickled_in(folder: Path) -> str:
    """The name of a file with pickled weights, of which there may be several; empty for none."""
    found = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth") for p in folder.glob(kind))
    return found[0] if found else ""
