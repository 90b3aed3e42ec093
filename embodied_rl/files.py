"""Files that are either whole or not there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name, flush it to the disk and rename it."""
    temporary = path.with_name(f".{path.name}.unfinished")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, data: Any) -> None:
    """Write plain data as readable JSON, whole or not at all."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that takes the name `path`, replacing what is there, if all goes well."""
    temporary = path.with_name(f".{path.name}.unfinished")
    if path.parent.exists():
        recover(path.parent)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for file in temporary.rglob("*"):
        _flush(file)
    _flush(temporary)
    replaced = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    temporary.rename(path)
    _flush(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(directory: Path) -> None:
    """Put back folders that a process was replacing by `new_folder` when it was killed."""
    for replaced in directory.glob(".*.replaced"):
        path = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
        if path.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
