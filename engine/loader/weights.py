"""Loads the weights of a model, by the slices that this rank holds."""

from __future__ import annotations

import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import nn

from engine.layers.base import Build, MadeTensors, WeightRule
from engine.layers.moe import Experts
from engine.loader.checkpoint import ModelFolder
from engine.loader.kv_scales import KV_SCALE
from engine.loader.parameters import fill_as_on_disk, load_by_recipe, load_made, load_scale
from engine.loader.safetensors_file import Checkpoint
from engine.loader.tensor_names import (
    HEAD,
    NO_NEED,
    NO_WEIGHTS,
    all_names,
    check_tied_head,
    is_no_bias,
    is_unused,
    names_on_disk,
    refuse_tensors,
    tell_unread,
    usual_scale_names,
)
from engine.loader.weight_reader import Told
from engine.models.blueprint import build_model
from engine.models.causal_lm import CausalLM
from engine.models.config import ModelConfig
from engine.models.text_halves import text_names
from engine.quantization.select import quantize, quantize_head
from engine.quantization.spec import QuantizationSpec
from parallel.group import Group
from parallel.linear import ParallelLinear

logger = logging.getLogger(__name__)

FIRST_NUMBER = re.compile(r"\D*\.\d+(?=\.)")


def load_model(
    folder: ModelFolder,
    max_positions: int,
    group: Group,
    dtype: torch.dtype,
    quantization: QuantizationSpec | None = None,
    *,
    expert_parallel: bool = False,
    told: Told = lambda _: None,
) -> CausalLM:
    """Build the model and fill this rank's shard of every parameter.

    expert_parallel: as in `Build`. quantization: of the linear layers, the checkpoint's or one that is made here, a
    layer at a time. told: called with the share of the weights that is read, 0 to 1, now and then. Raises
    `CheckpointError` naming tensors and files, `ShardingError` before anything is read when
    the sizes cannot be split over the group.
    """
    config = folder.config
    model = build_model(config, Build(group, dtype, max_positions, expert_parallel))
    model.requires_grad_(False)
    quantize(model.layers, model.layers_path, model.names, quantization)
    checkpoint = Checkpoint(folder.path)
    try:
        stored = quantization if quantization is not None and quantization.stored else None
        _load(model, config, checkpoint, stored, told)
    finally:
        checkpoint.close()
    model.finish_loading()
    return model.eval()


def _load(
    model: CausalLM, config: ModelConfig, checkpoint: Checkpoint, quantization: QuantizationSpec | None, told: Told
) -> None:
    """Fill all parameters. quantization: how the checkpoint holds them, None = they are plain there."""
    stored = quantization is not None
    if config.text_half_of:
        half, apart = text_names(checkpoint.names)
        checkpoint.select(half)
        logger.info("text half of %s: %d tensors of its other parts are not read", config.text_half_of, apart)
    if quantization is not None and quantization.method == "fp8" and quantization.block is None:
        checkpoint.select(usual_scale_names(checkpoint.names))
    if quantization is not None and model.head.weight is not model.table:
        quantize_head(model.head, HEAD.removesuffix(".weight"), quantization, checkpoint.names)
    rules = list(model.weights(checkpoint.names))
    wanted = {name for rule in rules for name in rule.names}
    spare = {name for rule in rules for name in rule.spare_names}
    unused = [NO_WEIGHTS, KV_SCALE, *([NO_NEED] if stored else [])]
    if (held := model.stored(checkpoint.names, wanted | spare)) is not None:
        check_tied_head(model, rules, checkpoint, held.plain)
        extra = {name for name in held.unknown if name != HEAD and not any(each.search(name) for each in unused)}
        refuse_tensors(checkpoint.folder, "not part of this architecture", extra)
        refuse_tensors(checkpoint.folder, "missing", {*held.lacking} - spare)
        tell_unread(held.unknown)
        _read_all(model, rules, held.plain, checkpoint, told, held.made)
        return
    names = names_on_disk(checkpoint.names, rules)
    others = names.keys() - wanted - {HEAD} - spare
    if any(isinstance(part, Experts) and part.whole for part in model.modules()):
        others -= set(all_names(config, quantization, checkpoint.names))  # other ranks' experts
    check_tied_head(model, rules, checkpoint, names)
    refuse_tensors(checkpoint.folder, "missing", wanted - names.keys())
    extra = {
        name
        for name in others
        if not any(pattern.search(name) for pattern in unused)
        and not is_unused(model, config, name)
        and not (stored and is_no_bias(checkpoint, names[name]))
    }
    refuse_tensors(checkpoint.folder, "not part of this architecture", extra)
    tell_unread(others)
    _read_all(model, rules, names, checkpoint, told)


def _read_all(
    model: CausalLM,
    rules: list[WeightRule],
    names: Mapping[str, str],
    checkpoint: Checkpoint,
    told: Told,
    made: Sequence[MadeTensors] = (),
) -> None:
    """Fill the parameters. names: in the rules -> on disk. made: tensors of the rules that have to be made."""
    began = time.perf_counter()
    by_name: dict[str, list[WeightRule]] = defaultdict(list)
    for rule in rules:
        if rule.recipe is None:
            by_name[rule.name].append(rule)
    of_layer: dict[str, list[MadeTensors]] = defaultdict(list)
    for one in made:
        of_layer[_layer_of(next((rule.target for rule in by_name[one.target]), one.target))].append(one)
    found = set(names)
    num_bytes = done = 0
    whole = max(_elements(rules), 1)
    for batch in _batches(model, rules):
        as_it_is = [rule for rule in batch if rule.recipe is None and rule.name in names]
        plain = [rule for rule in as_it_is if not rule.scale]
        part = partial(_tell_part, told, done / whole, _elements(plain) / whole)
        num_bytes += fill_as_on_disk(model, plain, checkpoint, names, part)
        for rule in as_it_is:
            if rule.scale:
                load_scale(model, rule, checkpoint, names[rule.name])
        for rule in batch:
            if rule.recipe is not None:
                num_bytes += load_by_recipe(model, rule, rule.recipe, checkpoint, names)
        for layer in dict.fromkeys(_layer_of(rule.target) for rule in batch):
            for one in of_layer.pop(layer, ()):
                for name, tensor in one.tensors(lambda source: checkpoint.source(source)[:]).items():
                    found.add(name)
                    num_bytes += tensor.nbytes
                    for rule in by_name.get(name, ()):
                        load_made(model, rule, tensor, checkpoint.folder)
        _finish(model.get_submodule(path) for path in dict.fromkeys(rule.target.rpartition(".")[0] for rule in batch))
        done += _elements(batch)
        told(done / whole)
    refuse_tensors(checkpoint.folder, "missing", by_name.keys() - found)
    seconds = max(time.perf_counter() - began, 1e-9)
    gigabytes = num_bytes / 1e9
    logger.info("weights: %.2f GB read in %.2f s, %.1f GB/s", gigabytes, seconds, gigabytes / seconds)


def _elements(rules: Iterable[WeightRule]) -> int:
    return sum(math.prod(rule.shape) for rule in rules)


def _tell_part(told: Told, before: float, size: float, share: float) -> None:
    """Tell of the share of a part, as one of all: `before` lies before it, and it is as large as `size`."""
    told(before + size * share)


def _finish(modules: Iterable[nn.Module]) -> None:
    """Let the linear layers among these make what they need of what was loaded."""
    for layer in modules:
        if isinstance(layer, ParallelLinear):
            layer.order_rows()
            layer.method.load(layer)


def _batches(model: CausalLM, rules: list[WeightRule]) -> Iterator[list[WeightRule]]:
    """Yield the rules by what may be in memory as it is on disk at one time: a layer where that is larger, or all."""
    linear = (part for part in model.modules() if isinstance(part, ParallelLinear))
    if not any(part.method.loads_plain for part in linear):
        yield rules
        return
    for _, batch in groupby(rules, lambda rule: _layer_of(rule.target)):
        yield list(batch)


def _layer_of(target: str) -> str:
    """Return a parameter's path up to its first number, which is that of its layer; "" where there is none."""
    found = FIRST_NUMBER.match(target)
    return "" if found is None else found[0]
