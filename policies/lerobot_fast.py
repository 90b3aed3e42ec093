"""The FAST processor of a checkpoint of lerobot, which lerobot itself fetches as code and runs."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from policies.checkpoints import BadCheckpoint, local_folder
from policies.fast_tokens import FILES

FAST_FOLDER = "fast"
"""In folders that we save: the FAST processor's two files, which lerobot looks up by name."""

_MODEL = "lerobot.policies.pi0_fast.modeling_pi0_fast"


def fast_folder(folder: Path, given: Path | None) -> Path:
    """Where the files of the checkpoint's FAST processor lie: in the folder that was given, else in
    the checkpoint, else under the name that it has on the Hub. Raises BadCheckpoint."""
    if given is None and (folder / FAST_FOLDER).is_dir():
        given = folder / FAST_FOLDER
    name = json.loads((folder / "config.json").read_text()).get("action_tokenizer_name", "")
    advice = f"policy.processor=FOLDER gives a copy of {name or 'the FAST processor'}"
    try:
        found = given or local_folder(name, FILES)
    except BadCheckpoint as error:
        raise BadCheckpoint(
            f"the checkpoint {folder} speaks with the FAST processor {name!r}, which is no folder "
            f"here and cannot be fetched from the Hugging Face Hub. {advice}."
        ) from error
    if missing := [file for file in FILES if not (found / file).is_file()]:
        raise BadCheckpoint(
            f"{found} is no folder of a FAST processor: it has no {missing[0]}. {advice}."
        )
    return found


@contextlib.contextmanager
def without_remote_code(tokenizer: Any) -> Iterator[None]:
    """Within, lerobot's class is built with this text tokenizer and no FAST processor, instead of
    fetching both by name and running the code that comes with them."""
    module: Any = importlib.import_module(_MODEL)
    before = module.AutoTokenizer, module.AutoProcessor
    module.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: tokenizer)
    module.AutoProcessor = SimpleNamespace(from_pretrained=lambda *_, **__: None)
    try:
        yield
    finally:
        module.AutoTokenizer, module.AutoProcessor = before
