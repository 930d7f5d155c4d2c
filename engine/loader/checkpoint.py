"""Checkpoint folders: where they are, their config, their files and the sums published with these. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open

from engine.config import split_revision
from engine.errors import CheckpointError
from engine.loader.overrides import overridden
from engine.models.config import HFConfig, ModelConfig, known_token_ids
from engine.models.registry import implementation
from engine.models.text_halves import MULTIMODAL

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
WEIGHT_SUFFIX = ".safetensors"
WEIGHT_FILES = f"*{WEIGHT_SUFFIX}"
# What says how large a model is; what a router reads; what a served model needs. Weights in other formats are never
# fetched.
QUANTIZATION_FILE = "hf_quant_config.json"  # where NVIDIA's Model Optimizer says what config.json does not
CONFIG_FILES = ("config.json", "generation_config.json", QUANTIZATION_FILE)
# A safetensors file begins with the length of its header, little-endian. The format takes 100 MB, which
# take gigabytes and minutes to read; the hub itself reads none above 25 MB, which name some 200,000 tensors.
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 25_000_000
MAX_JSON_BYTES = 100_000_000  # of a config or an index; those of the largest models have a fifth
MOST_SHOWN = 200  # characters of a name out of a file that a message shows
TEXT_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
HUB_FILES = (*TEXT_FILES, WEIGHT_FILES, "SHA256SUMS")


def find_checkpoint(model: str, files: Sequence[str] = HUB_FILES) -> Path:
    """Return the folder of a checkpoint: `model` itself, or the hub's cached copy of the id, fetched if need be.

    model: may end with the revision of an id, as `EngineConfig.source` does. files: patterns of what is fetched; more
    may be there. With HF_HUB_OFFLINE set only the cache is looked at. Raises `CheckpointError` when there is no such
    folder, id or revision.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    model, revision = split_revision(model)
    if revision is not None and Path(model).expanduser().is_dir():
        raise CheckpointError(
            f"revision: {model!r} is a folder, and only ids of the hub have revisions; leave it out"
        )
    if folder.exists() or model.startswith(("/", "./", "../", "~")):
        raise CheckpointError(f"model: {model!r} is not a folder; give one with config.json and {SINGLE_FILE}")
    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=list(files)))
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"revision: {model!r} has no branch, tag or commit {revision!r}; its page on the hub lists them"
        ) from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"model: {model!r} is gated; accept its terms on the hub and log in (`hf auth login`)"
        ) from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise CheckpointError(f"model: {model!r} is neither a folder nor a model of the hub") from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"model: {model!r} is not a folder, is not in the hub's cache, and the hub cannot be reached; "
            "download it first (`hf download`) or give a folder"
        ) from error
    except Exception as error:
        # Errors of the hub's HTTP library come through as they are, and which library that is depends on the version.
        if not isinstance(error, HfHubHTTPError.__bases__):
            raise
        raise CheckpointError(
            f"model: the connection to the hub was lost while {model!r} was fetched ({error}); try again: what came "
            "is kept"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `CheckpointError` when it is missing or damaged."""
    try:
        size = regular_size(path)
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: has {size} bytes, and {MAX_JSON_BYTES} are the most that are read")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    except RecursionError:
        raise CheckpointError(f"{path}: cannot be read as JSON: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value


def weight_files(folder: Path) -> list[str]:
    """Return the names of the folder's weight files, sorted. Raises `CheckpointError` when it has none."""
    return sorted(set(tensor_files(folder).values()))


def check_weight_files(folder: Path) -> None:
    """Read the headers of the folder's weight files. Raises `CheckpointError` when one is missing or truncated."""
    for name in weight_files(folder):
        open_safetensors(folder / name)


def open_safetensors(path: Path) -> Any:
    """Open one file. Raises `CheckpointError` when it is missing, truncated or no safetensors file."""
    try:
        header_bytes(path)
        return safe_open(path, framework="np")  # nothing but names is asked for, and "pt" would import torch
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: weight file {path.name} is missing") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: truncated or damaged: {error}") from error


def header_bytes(path: Path) -> int:
    """Return the length of a safetensors file's header, once it is plain that reading it takes little.

    Raises `ValueError` saying what is wrong, and `OSError`.
    """
    regular_size(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"it tells of a header of {length} bytes, and {MAX_HEADER_BYTES} are the most that are read")
    return length


def regular_size(path: Path) -> int:
    """Return the bytes of a file. Raises `ValueError` for others: to open a pipe would wait for ever for a writer."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")
    return found.st_size


def shown(name: str) -> str:
    """Return a name out of a file, as a message can hold it."""
    return name if len(name) <= MOST_SHOWN and name.isprintable() else f"{name[:MOST_SHOWN]!a}"


def tensor_files(folder: Path) -> Mapping[str, str]:
    """Return tensor name -> file name. Raises `CheckpointError` when the folder has none, or none to be trusted."""
    if (folder / INDEX_FILE).is_file():
        return _indexed(folder)
    if (folder / SINGLE_FILE).is_file():
        return dict.fromkeys(open_safetensors(folder / SINGLE_FILE).keys(), SINGLE_FILE)
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder}: only pickled weights ({', '.join(pickles)}), which can run code when they are read; "
            "convert them to safetensors"
        )
    raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _indexed(folder: Path) -> Mapping[str, str]:
    files = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{folder / INDEX_FILE}: weight_map must map tensors to files")
    for file in set(files.values()):
        if Path(file).name != file or file in {"", ".."}:
            raise CheckpointError(f"{folder / INDEX_FILE}: {file[:MOST_SHOWN]!a} is outside the folder")
        if not file.isprintable() or not file.endswith(WEIGHT_SUFFIX):
            raise CheckpointError(
                f"{folder / INDEX_FILE}: {file[:MOST_SHOWN]!a} is no name of a {WEIGHT_SUFFIX} file"
            )
    return files


def _has_head(folder: Path) -> bool | None:
    """Whether there is a tensor of an output head; None where there are no weights to look for it in."""
    try:
        return any(name.endswith("lm_head.weight") for name in tensor_files(folder))
    except CheckpointError:  # is told when they are loaded
        return None


SUMS_FILE = "SHA256SUMS"  # as `sha256sum *.safetensors > SHA256SUMS` writes it
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


def summed_files(folder: Path) -> Mapping[str, str]:
    """Return file name -> SHA-256 in hex, of the files that a checkpoint is read from and has in its `SHA256SUMS`.

    Sums are often those of a whole repository: lines for files that were not fetched, or that nothing reads (weights
    in other formats, pictures, folders), say nothing of what is served. A weight file that is missing is refused
    where the weights are looked for. Raises `CheckpointError` naming the line that is none.
    """
    path = folder / SUMS_FILE
    if not path.is_file():
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    weights = weight_files(folder)
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.rstrip())
        if match is None:
            raise CheckpointError(f"{path}:{number}: must be a SHA-256 in hex, two spaces and the name of a file")
        name = match[2].removeprefix("./")
        if name in weights or (_is_read(name) and (folder / name).is_file()):
            found[name] = match[1].lower()
    return found


def check_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Compare files of a checkpoint with their sums; reads them whole, at disk speed.

    Raises `CheckpointError` naming the file that differs or cannot be read.
    """
    for name, expected in sums.items():
        try:
            with (folder / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: weight file {name} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{folder / name}: cannot be read: {error}") from error
        if found != expected:
            raise CheckpointError(
                f"{folder / name}: damaged: its SHA-256 is not the one in {SUMS_FILE}; fetch it again"
            )


def _is_read(name: str) -> bool:
    """Whether a file beside the weights has a part in what is served."""
    return Path(name).name == name and any(
        fnmatchcase(name, pattern) for pattern in HUB_FILES if pattern != WEIGHT_FILES
    )


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checkpoint whose config has been read and understood; no weight has been loaded.

    phases: seconds by phase that its files took so far.
    """

    path: Path
    config: ModelConfig
    phases: Mapping[str, float] = field(default_factory=dict)


def read_config(folder: Path, overrides: str | None = None) -> dict[str, Any]:
    """Return config.json as `overrides` (`EngineConfig.hf_overrides`) has it. Raises `CheckpointError`."""
    values = read_json(folder / "config.json")
    return overridden(values, json.loads(overrides)) if overrides else values


def _is_elsewhere(found: Any) -> bool:
    """Whether config.json leaves it to modelopt's own file how weights are stored, or which layers are stored how."""
    mixed = isinstance(found, Mapping) and found.get("quant_algo") == "MIXED_PRECISION"
    return not found or (mixed and not found.get("quantized_layers"))


def open_model(
    model: str, files: Sequence[str] = HUB_FILES, impl: str = "auto", overrides: str | None = None
) -> ModelFolder:
    """Find a checkpoint (folder or hub id) and read its config. files: what of it is wanted from the hub.

    impl, overrides: `model_impl` and `hf_overrides` of the engine's config.

    What a family asks of the config is read when a model is built, first by `engine.models.blueprint`.

    Code that a checkpoint brings along (`auto_map`) is never run. Raises `CheckpointError`.
    """
    path = find_checkpoint(model, files)
    values = read_config(path, overrides)
    if values.get("auto_map"):
        logger.warning("%s brings its own code (auto_map), which is ignored", path)
    if _is_elsewhere(values.get("quantization_config")) and (path / QUANTIZATION_FILE).is_file():
        said = read_json(path / QUANTIZATION_FILE)
        values = {**values, "quantization_config": {"quant_method": "modelopt", **said}}
    if HFConfig(values).architecture in MULTIMODAL and (head := _has_head(path)) is not None:
        # Their configs say this now of the whole, now of its text half, or not at all.
        values = {**values, "tie_word_embeddings": not head}
    config = ModelConfig.of(values)
    config = replace(config, implementation=implementation(config.architecture, impl), falls_back=impl == "auto")
    generation = path / "generation_config.json"
    if generation.is_file():
        more = known_token_ids(read_json(generation).get("eos_token_id"), config.vocab_size)
        config = replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))
    return ModelFolder(path, config)
