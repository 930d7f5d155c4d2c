"""Which model a replica runs, in a few characters: equal on every copy of a checkpoint, different after any training.

Cheap: of the weights only the headers and a sample of each tensor are read, so a folder of any size takes seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from engine.config import EngineConfig, split_revision
from engine.errors import CheckpointError
from engine.loader.checkpoint import (
    LENGTH_BYTES,
    QUANTIZATION_FILE,
    TEXT_FILES,
    find_checkpoint,
    header_bytes,
    open_model,
    read_config,
    read_json,
    weight_files,
)

SAMPLE_BYTES = 256
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")
# What else makes prompts of texts and chats.
PROMPT_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
# What the saving library writes about itself; it changes no token.
NO_PART_OF_THE_MODEL = ("_name_or_path", "transformers_version")
# Beside them what a training leaves in a config.json: neither the layers nor how they compute.
HARMLESS = (*NO_PART_OF_THE_MODEL, "dtype", "torch_dtype", "use_cache")
ROOT = Path(__file__).parents[2]
COMPUTING = ("engine", "parallel")  # packages
# What draws a token from given logits: another version of it draws others, however exact the logits are.
DRAWING = (
    "engine/sampling/device_rules.py",
    "engine/sampling/gumbel.py",
    "engine/grammar",
    "engine/kernels/draw.c",
    "engine/kernels/native_sampler.py",
    "engine/kernels/runs.h",
    "engine/kernels/thresholds.h",
    "engine/kernels/triton_draw.py",
    "engine/kernels/triton_sampler.py",
    "engine/kernels/vectors.h",
    "engine/sampling/logit_rules.py",
    "engine/sampling/sampler.py",
    "engine/sampling/parameter_table.py",
    "engine/sampling/sharded_draw.py",
)
SOURCES = (".py", ".c", ".h")
# Weights that an earlier version made otherwise, so that no batch of its goes on with these.
ROUNDED_ANEW = {"int8": "int8, scales in the dtype", "fp8": "fp8, scales in the dtype"}


def replica_fingerprint(weights: str, arithmetic: Mapping[str, str]) -> str:
    """Return what distinguishes a replica from others: `WEIGHTS.DRAWING.ARITHMETIC`.

    weights: its `model_fingerprint`. arithmetic: `engine.worker.invariance.arithmetic_of` it. Where all three are
    equal a stream goes on as if nothing had happened. Where the last one differs, logits differ by rounding.
    """
    arithmetic_digest = hashlib.blake2b(_canonical(dict(arithmetic)), digest_size=8).hexdigest()
    return f"{weights}.{sources_digest(DRAWING)}.{arithmetic_digest}"


def weights_of(fingerprint: str) -> str:
    """Return the part of a replica's fingerprint that concerns the model alone."""
    return fingerprint.partition(".")[0]


def but_for_rounding(fingerprint: str) -> str:
    """Return a replica's fingerprint without the part in which those differ that round differently."""
    weights, _, rest = fingerprint.partition(".")
    return f"{weights}.{rest.partition('.')[0]}"


@cache
def sources_digest(paths: Sequence[str] = COMPUTING) -> str:
    """Return 16 hex digits for our own code in files and folders below the root of the installation."""
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        found = ROOT / path
        files = [found] if found.suffix else sorted(one for one in found.rglob("*") if one.suffix in SOURCES)
        for file in files:
            digest.update(_canonical(file.relative_to(ROOT).as_posix()) + file.read_bytes())
    return digest.hexdigest()


def model_fingerprint(model: str, dtype: str, quantization: str | None = None, overrides: str | None = None) -> str:
    """Return 32 hex digits for a checkpoint (folder or hub id) computed in `dtype`, its weights quantised or not.

    Two replicas for which it is equal hold the same weights; `replica_fingerprint` says what they make of them.
    Covers config.json with `overrides` (`EngineConfig.hf_overrides`), hf_quant_config.json, the ends that
    generation_config.json names, and of each weight file its name, size, header and a sample of every tensor; not the
    files' times, which differ from node to node. Raises `CheckpointError`.
    """
    folder = find_checkpoint(model)
    digest = hashlib.blake2b(_arithmetic(dtype, quantization).encode(), digest_size=16)
    digest.update(_canonical(_without_origin(read_config(folder, overrides))))
    generation = folder / "generation_config.json"
    if generation.is_file():
        digest.update(_canonical(read_json(generation).get("eos_token_id")))
    if (folder / QUANTIZATION_FILE).is_file():
        digest.update(_canonical(read_json(folder / QUANTIZATION_FILE)))
    for name in weight_files(folder):
        digest.update(_canonical(name))
        _read_into(digest, folder / name)
    return digest.hexdigest()


def weights_fingerprint(folder: Path, config: EngineConfig) -> str:
    """Return the `model_fingerprint` of a folder as it is now. config: resolved. Raises `CheckpointError`."""
    return model_fingerprint(str(folder), config.dtype, config.weight_form, config.hf_overrides)


def refuse_other_settings(folder: Path, before: Mapping[str, Any], vocabulary: str, config: EngineConfig) -> None:
    """Raise `CheckpointError` where a folder's weights cannot be served as it was when its config.json was `before`.

    vocabulary: its `vocabulary_fingerprint` then. What only one of the two files says is left to their writers:
    libraries leave defaults out, or not.
    """
    now = open_model(str(folder), impl=config.model_impl, overrides=config.hf_overrides).config.raw
    other = [name for name, value in now.items() if name not in HARMLESS and before.get(name, value) != value]
    if other:
        raise CheckpointError(f"{folder}: config.json has another {', '.join(other)} than at the start; start anew")
    if vocabulary_fingerprint(str(folder), config.tokenizer) != vocabulary:
        raise CheckpointError(f"{folder}: the tokenizer is another one than at the start; put it back, or start anew")


def model_identity(model: str, dtype: str, quantization: str | None = None, overrides: str | None = None) -> str:
    """Return 32 hex digits that are others when a checkpoint (folder or hub id) is another one, fetching no weights.

    Of a folder its fingerprint; of a hub id its revision, under which the hub never puts other contents: as a folder
    the same model is another. Raises `CheckpointError`.
    """
    if Path(model).expanduser().is_dir():
        return model_fingerprint(model, dtype, quantization, overrides)
    commit = find_checkpoint(model, TEXT_FILES).name  # as the hub's cache names its snapshots
    parts = [split_revision(model)[0], commit, _arithmetic(dtype, quantization)]
    changed = [] if overrides is None else [overrides]
    return hashlib.blake2b(_canonical(parts + changed), digest_size=16).hexdigest()


def vocabulary_fingerprint(model: str, tokenizer: str | None = None) -> str:
    """Return 32 hex digits for what texts are cut into: equal where a router may speak for a replica.

    Covers the size of the vocabulary and the files that hold it, `tokenizer`'s where that is given; of a tokenizer on
    the hub only the id. Raises `CheckpointError`.
    """
    folder = find_checkpoint(model, TEXT_FILES)
    digest = hashlib.blake2b(_canonical(read_json(folder / "config.json").get("vocab_size")), digest_size=16)
    _read_tokenizer_into(digest, folder, tokenizer, VOCABULARY_FILES)
    return digest.hexdigest()


def prompt_fingerprint(model: str, tokenizer: str | None = None, chat_template: str | None = None) -> str:
    """Return 32 hex digits for what makes tokens of requests: equal where each prompt has the same tokens.

    Covers all files of the tokenizer, chat templates and special tokens among them, `tokenizer`'s where that is
    given; of a tokenizer on the hub only the id. chat_template: in the place of the model's own. Raises
    `CheckpointError`.
    """
    folder = find_checkpoint(model, TEXT_FILES)
    digest = hashlib.blake2b(digest_size=16)
    _read_tokenizer_into(digest, folder, tokenizer, (*VOCABULARY_FILES, *PROMPT_FILES))
    if chat_template is not None:
        digest.update(_canonical(chat_template))
    return digest.hexdigest()


def _arithmetic(dtype: str, quantization: str | None) -> str:
    """Where nothing is quantised as it always was, so that batches begun before go on."""
    return dtype if quantization is None else f"{dtype} {ROUNDED_ANEW.get(quantization, quantization)}"


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\0"


def _without_origin(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in NO_PART_OF_THE_MODEL}


def _read_tokenizer_into(digest: hashlib.blake2b, folder: Path, tokenizer: str | None, names: Sequence[str]) -> None:
    """Take in those files that are there; names: some of them patterns."""
    where = folder if tokenizer is None else Path(tokenizer).expanduser()
    if not where.is_dir():
        digest.update(_canonical(tokenizer))
    for path in [path for name in names for path in sorted(where.glob(name))]:
        try:
            digest.update(_canonical(path.name) + path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _read_into(digest: hashlib.blake2b, path: Path) -> None:
    try:
        length = header_bytes(path)
        with path.open("rb") as file:
            file.seek(LENGTH_BYTES)
            header = _header(file, length)
            start = file.tell()
            digest.update(header)
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            ranges = _ranges(header)
            end = start + max((last for _, last in ranges), default=0)
            if size != end:
                raise ValueError(f"{size} bytes, and its header tells of {end}")
            for first, last in ranges:
                file.seek(start + max(first, (first + last - SAMPLE_BYTES) // 2))
                digest.update(file.read(min(SAMPLE_BYTES, last - first)))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: weight file {path.name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: truncated or damaged: {error}") from error


def _header(file: BinaryIO, length: int) -> bytes:
    header = file.read(length)
    if len(header) < length:
        raise ValueError(f"{len(header)} bytes of a header of {length}")
    return header


def _ranges(header: bytes) -> list[tuple[int, int]]:
    """Return the bytes of each tensor, counted from the header's end, in the order of the file."""
    tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    ranges = sorted((int(first), int(last)) for first, last in (entry["data_offsets"] for entry in tensors.values()))
    if any(first < 0 or last < first for first, last in ranges):
        raise ValueError("its header tells of a tensor that ends before it begins")
    return ranges
