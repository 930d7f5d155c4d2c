"""Loads a tokenizer through transformers, and without torch where the folder itself says which class reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from engine.errors import CheckpointError

# `AutoTokenizer` imports torch, which a router never uses, to weigh what a folder declares against what it knows of
# its model. For these models it takes these two declarations as they are, and both mean `PreTrainedTokenizerFast`.
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
MOST_TOLD = 500  # characters of the libraries' errors
TAKEN_AS_DECLARED = ("llama", "qwen3", "gemma2", "gemma3_text")


def load_tokenizer(name: str) -> Any:
    """Return transformers' fast tokenizer of a folder or a cached hub id. Raises `CheckpointError`."""
    try:
        if _declares_generic(Path(name).expanduser()):
            loaded = transformers.PreTrainedTokenizerFast.from_pretrained(Path(name).expanduser())
        else:
            loaded = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False, use_fast=True)
    except Exception as error:
        # The tokenizers library raises plain `Exception` for a file that it cannot read. No error of a damaged file
        # is to be taken for one of ours.
        told = str(error)[:MOST_TOLD]
        raise CheckpointError(f"no usable tokenizer in {name!r} (tokenizer.json is needed): {told}") from error
    if not getattr(loaded, "is_fast", False):
        raise CheckpointError(f"the tokenizer of {name!r} has no fast version; add a tokenizer.json to the folder")
    return loaded


def _declares_generic(folder: Path) -> bool:
    """Return whether `PreTrainedTokenizerFast` is what reads the folder; in doubt transformers decides."""
    try:
        declared = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return (
            (folder / "tokenizer.json").is_file()
            and declared["tokenizer_class"] in GENERIC_CLASSES
            and "auto_map" not in declared
            and model["model_type"] in TAKEN_AS_DECLARED
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
