"""Writes a checkpoint again with its linear layers quantised, as compressed-tensors, which other engines read, too.

Format: `compressed-tensors` 0.20's pack-quantized (int4 by groups, int8 by channels) and float-quantized (fp8).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import CheckpointError, ConfigError
from engine.layers.base import checkpoint_names, is_stacked, is_transposed
from engine.loader.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    TEXT_FILES,
    ModelFolder,
    check_sums,
    read_json,
    summed_files,
)
from engine.loader.safetensors_file import Checkpoint
from engine.loader.tensor_names import names_on_disk, refuse_tensors
from engine.models.blueprint import blueprint
from engine.models.causal_lm import CausalLM
from engine.models.decoder import DecoderLM
from engine.models.text_halves import text_names
from engine.quantization.made_int4 import quantised_int4
from engine.quantization.method import scale_dtype
from engine.quantization.select import METHODS, made_at_load, quantize, quantized_layers
from engine.quantization.spec import QuantizationSpec
from parallel.linear import ParallelLinear

SHARD_BYTES = 4_000_000_000  # of tensors in one file, about
# Beside the weights; code that a checkpoint brings along is for other engines, and is not run here.
COPIED = (
    *TEXT_FILES,
    *("LICENSE*", "NOTICE*", "COPYING*", "*.md", "*.py", "*.tiktoken"),
    "additional_chat_templates/*.jinja",
)
NOT_COPIED = ("config.json", INDEX_FILE)
READABLE = 0o644
PER_INT32 = 4  # numbers of eight bits
OnBytes = Callable[[int, int], None]  # bytes read so far, and in all


@dataclass(frozen=True, slots=True)
class QuantisedCopy:
    """What was written. layers: that were quantised. plain: modules with a weight of two axes that were not.

    before, after: bytes of tensors.
    """

    layers: int
    plain: tuple[str, ...]
    before: int
    after: int


def write_quantised(
    model: ModelFolder, target: Path, method: str, group: int | None = None, on_bytes: OnBytes = lambda *_: None
) -> QuantisedCopy:
    """Write `model` to the folder `target` with its linear layers in `method`: "int4", "int8" or "fp8".

    group: `quantization_group_size`. Scales are of each tensor's dtype, but for float16 (`scale_dtype`). One tensor
    is in memory at a time, beside the file that is being put together. The folder is there when it is whole.

    Raises `ConfigError` for a folder with something in it and for groups that do not fit, `CheckpointError` for a
    model that is quantised already, damaged, or whose layers the format has no words for.
    """
    spec = made_at_load(method, group)
    check_sums(model.path, summed_files(model.path))
    checkpoint = Checkpoint(model.path)
    try:
        shapes = _quantised_tensors(model, checkpoint, spec)
        with _new_folder(target.expanduser().resolve()) as folder:
            found = _write(checkpoint, folder, shapes, spec, on_bytes)
            _copy_texts(model.path, folder)
            values = read_json(model.path / "config.json")
            written = {**values, "quantization_config": _described(spec, found.plain)}
            (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    finally:
        checkpoint.close()
    return found


def _quantised_tensors(
    model: ModelFolder, checkpoint: Checkpoint, spec: QuantizationSpec
) -> dict[str, tuple[int, ...]]:
    """Return the names on disk of the weights to quantise, with the shapes that config.json makes them."""
    if model.config.quantization is not None:
        raise CheckpointError(f"{model.path}: the checkpoint is quantised already; give the unquantised one")
    built = blueprint(model.config)
    if not isinstance(built, DecoderLM):
        raise CheckpointError(
            f"{model.path}: {model.config.architecture} is served by layers of the transformers library, which may "
            "hold tensors under other names; serve it with --quantization, which quantises as it loads"
        )
    names = {name: name for name in checkpoint.names}
    if model.config.text_half_of:
        names, _ = text_names(checkpoint.names)
    rules = list(built.weights())
    shapes = {rule.name: rule.shape for rule in rules}
    wanted = {f"{name}.weight" for name in _module_names(built)}
    quantize(built.layers, built.layers_path, built.names, spec)  # for its checks
    on_disk = {name: names[at] for name, at in names_on_disk(names, rules).items()}
    form = "missing, or held together with others (then serve it with --quantization, which quantises as it loads)"
    refuse_tensors(model.path, form, wanted - on_disk.keys())
    return {on_disk[name]: shapes[name] for name in wanted}


def _module_names(built: CausalLM) -> Iterator[str]:
    for path, layer in quantized_layers(built.layers, "layers"):
        if not isinstance(layer, ParallelLinear):
            continue  # the products of latent attention's heads stay plain
        found = checkpoint_names(built.names, path)
        if is_transposed(built.names, path) or is_stacked(built.names, path):
            kind = "holds experts in one tensor" if is_stacked(built.names, path) else "is a Conv1D"
            raise CheckpointError(
                f"{found[0]} {kind}, which compressed-tensors has no words for; serve the plain checkpoint with "
                "--quantization, which quantises as it loads"
            )
        yield from found


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder that becomes `target` if all goes well, and is removed if not."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already; give a folder that is empty or not there yet", "folder")
    if target.is_mount():  # which nothing can take the place of
        raise ConfigError(f"{target} is a mount point; give a folder inside it, such as {target / 'model'}", "folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as held:
            folder = Path(held) / target.name
            folder.mkdir()
            yield folder
            folder.replace(target)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{target} cannot be written: {error}", "folder") from error


def _write(
    checkpoint: Checkpoint,
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    spec: QuantizationSpec,
    on_bytes: OnBytes,
) -> QuantisedCopy:
    """Write the tensors, in files of about `SHARD_BYTES`, and their index."""
    names = sorted(checkpoint.names)
    before = sum(_bytes_of(checkpoint, name) for name in names)
    shards, held, size, done, after = [list[str]()], dict[str, Tensor](), 0, 0, 0
    plain: list[str] = []
    for name in names:
        tensor = checkpoint.source(name)[:]
        if name in shapes:
            made = _quantised(name, tensor, shapes[name], spec)
        else:
            made = {name: tensor}
            plain += [name.removesuffix(".weight")] if tensor.ndim == 2 and name.endswith(".weight") else []
        added = sum(one.nbytes for one in made.values())
        if held and size + added > SHARD_BYTES:
            _save(held, folder / _part(len(shards)))
            shards.append([])
            held, size = {}, 0
        held |= made
        shards[-1] += made
        size, after, done = size + added, after + added, done + tensor.nbytes
        on_bytes(done, before)
    _save(held, folder / _part(len(shards)))
    _name_files(folder, shards, after)
    return QuantisedCopy(len(shapes), tuple(plain), before, after)


def _bytes_of(checkpoint: Checkpoint, name: str) -> int:
    source = checkpoint.source(name)
    return torch.empty(source.shape, dtype=source.dtype, device="meta").nbytes


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, {"format": "pt"})
    path.chmod(READABLE)  # the library makes a file that its owner alone reads


def _part(number: int) -> str:
    return f"part-{number}.safetensors"


def _name_files(folder: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        (folder / _part(1)).replace(folder / SINGLE_FILE)
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        (folder / _part(number)).replace(folder / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _quantised(name: str, weight: Tensor, shape: tuple[int, ...], spec: QuantizationSpec) -> dict[str, Tensor]:
    """Return what one weight becomes, by names on disk. Raises `CheckpointError` for one that is no plain weight."""
    if tuple(weight.shape) != shape or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(
            f"tensor {name} has shape {list(weight.shape)} and dtype {weight.dtype}; {list(shape)} of float32, "
            "bfloat16 or float16 is wanted"
        )
    if not bool(torch.isfinite(weight).all()):
        raise CheckpointError(f"tensor {name} holds a number that is not finite")
    module = name.removesuffix(".weight")
    if spec.weights == "int4":
        codes, scales = quantised_int4(weight, spec.group)
        packed = codes.view(torch.int32)
    else:
        form = METHODS[spec.weights]
        scale = form.scale_of(weight.abs().amax(dim=1).float(), weight.dtype)
        made, scales = form.quantised(weight, scale), scale.to(scale_dtype(weight.dtype))[:, None]
        if spec.weights == "fp8":
            return {name: made, f"{module}.weight_scale": scales}
        counted = torch.nn.functional.pad(made.view(torch.uint8) ^ 128, (0, -weight.shape[1] % PER_INT32))
        packed = counted.view(torch.int32)
    return {
        f"{module}.weight_packed": packed,
        f"{module}.weight_scale": scales,
        f"{module}.weight_shape": torch.tensor(shape),
    }


def _described(spec: QuantizationSpec, plain: tuple[str, ...]) -> dict[str, Any]:
    """Return `quantization_config` as compressed-tensors has it."""
    in_fp8 = spec.weights == "fp8"
    weights = {
        "num_bits": 4 if spec.weights == "int4" else 8,
        "type": "float" if in_fp8 else "int",
        "symmetric": True,
        "strategy": "group" if spec.group else "channel",
        "group_size": spec.group or None,
        "dynamic": False,
    }
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    layout = "float-quantized" if in_fp8 else "pack-quantized"
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs if in_fp8 else None,
        "output_activations": None,
        "format": layout,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted({*plain, "lm_head"}),
        "kv_cache_scheme": None,
    }


def _copy_texts(source: Path, folder: Path) -> None:
    """Copy what is there beside the weights: tokenizer, templates, licence."""
    for path in {path for pattern in COPIED for path in source.glob(pattern) if path.is_file()}:
        place = folder / path.relative_to(source)
        if path.name not in NOT_COPIED:
            place.parent.mkdir(exist_ok=True)
            try:
                place.write_bytes(path.read_bytes())
            except PermissionError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
