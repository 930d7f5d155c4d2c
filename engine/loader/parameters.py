"""Fills parameters with the tensors of their rules: as on disk, one scale for each row, by a recipe, or as made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.layers.base import WeightRule
from engine.loader.safetensors_file import Checkpoint, TensorOnDisk
from engine.loader.weight_reader import Told, fill
from engine.models.causal_lm import CausalLM
from engine.quantization.layout import EIGHT_BIT_SCALES, of_outputs
from parallel.parameter import Recipe, ShardedParameter, TensorSource, Transfer


def fill_as_on_disk(
    model: CausalLM, rules: list[WeightRule], checkpoint: Checkpoint, names: Mapping[str, str], told: Told
) -> int:
    """Fill what is on disk as it is here, several tensors at a time; returns the bytes read.

    names: in the rules -> on disk.
    """
    parameters = dict(model.named_parameters())
    reads = [read for rule in rules for read in _reads(parameters[rule.target], rule, checkpoint, names[rule.name])]
    num_bytes = fill(reads, model.group.device, model.group.size, told)
    for rule in rules:
        _sharded(parameters[rule.target], rule).mark_loaded(rule.part)
    return num_bytes


def load_scale(model: CausalLM, rule: WeightRule, checkpoint: Checkpoint, name: str) -> None:
    """Fill a scale for each row from these, or from a single one.

    Raises `CheckpointError` for another number or type of them, and where one is no number.
    """
    source = checkpoint.source(name)
    _check_dtype(source, name, EIGHT_BIT_SCALES)
    try:
        scales = of_outputs(source[:], rule.shape[0], name)
    except ValueError as error:
        raise CheckpointError(f"{source.file.path}: tensor {error}") from error
    _sharded(model.get_parameter(rule.target), rule).load(TensorSource(scales.expand(rule.shape)), rule.part)


def load_by_recipe(
    model: CausalLM, rule: WeightRule, recipe: Recipe, checkpoint: Checkpoint, names: Mapping[str, str]
) -> int:
    """Make one parameter, or a part of it, of all that its recipe names; returns the bytes read."""
    tensors: dict[str, Tensor] = {}
    for leaf, wanted in {**recipe.tensors, **recipe.spare}.items():
        if (name := names.get(f"{rule.stem}{leaf}")) is None:
            continue
        source = checkpoint.source(name)
        if rule.index is not None:
            source = source.entry(rule.index)
        if wanted.shape is not None and source.shape != wanted.shape:
            raise CheckpointError(
                f"{source.file.path}: tensor {name} has shape {list(source.shape)}, config.json makes it "
                f"{list(wanted.shape)}"
            )
        _check_dtype(source, name, wanted.dtypes)
        tensors[leaf] = source[:]
    try:
        made = recipe.make(tensors)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.folder}: tensor {rule.stem}{error}") from error
    _sharded(model.get_parameter(rule.target), rule).load(TensorSource(made), rule.part)
    return sum(tensor.nbytes for tensor in tensors.values())


def load_made(model: CausalLM, rule: WeightRule, tensor: Tensor, folder: Path) -> None:
    """Fill one parameter, or a part of it, with a tensor that was made of others."""
    if rule.index is not None and rule.index < len(tensor):
        tensor = tensor[rule.index]
    if tuple(tensor.shape) != rule.shape:
        raise CheckpointError(
            f"{folder}: tensor {rule.name} is made with shape {list(tensor.shape)}, config.json makes it "
            f"{list(rule.shape)}"
        )
    _sharded(model.get_parameter(rule.target), rule).load(TensorSource(tensor), rule.part, rule.transposed)


def _check_dtype(source: TensorOnDisk, name: str, wanted: Sequence[torch.dtype]) -> None:
    if source.dtype not in wanted:
        dtypes = " or ".join(str(dtype).removeprefix("torch.") for dtype in wanted)
        raise CheckpointError(f"{source.file.path}: tensor {name} is of {source.dtype}, not {dtypes}")


def _reads(
    parameter: nn.Parameter, rule: WeightRule, checkpoint: Checkpoint, name: str
) -> list[tuple[TensorOnDisk, Transfer]]:
    """Return what is to be read for one rule, the tensor's shape being checked."""
    source = checkpoint.source(name)
    if rule.packed:
        source = source.as_bytes()
    if rule.index is not None:
        source = source.entry(rule.index)
    # Some files hold experts as [experts, in, out], those of Qwen3-VL say. Where both fit, it is [experts, out, in].
    turned = rule.index is not None and rule.shape != source.shape == rule.shape[::-1]
    if source.shape != rule.shape and not turned:
        raise CheckpointError(
            f"{source.file.path}: tensor {name} has shape {list(source.shape)}, "
            f"config.json makes it {list(rule.shape)}"
        )
    if parameter.dtype.itemsize == 1 and source.dtype is not parameter.dtype and not rule.packed:
        # To cast what is no quantised weight would be to read it without its scale.
        raise CheckpointError(f"{source.file.path}: tensor {name} is of {source.dtype}, not {parameter.dtype}")
    transfers = _sharded(parameter, rule).transfers(source, rule.part, rule.transposed != turned)
    return [(source, transfer) for transfer in transfers]


def _sharded(parameter: nn.Parameter, rule: WeightRule) -> ShardedParameter:
    if not isinstance(parameter, ShardedParameter):
        raise TypeError(f"{rule.target} is no parameter that can load itself")
    return parameter
