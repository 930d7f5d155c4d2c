"""Loads the weights of a model, by the slices that this rank holds, and the scales of an fp8 KV cache."""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.layers.base import Build, MadeTensors, WeightRule
from engine.layers.moe import Experts
from engine.loader.checkpoint import ModelFolder
from engine.loader.safetensors_file import Checkpoint, TensorOnDisk
from engine.loader.weight_reader import fill
from engine.models.blueprint import blueprint, build_model
from engine.models.causal_lm import CausalLM
from engine.models.config import ModelConfig
from engine.models.text_halves import text_names
from engine.quantization.select import quantize
from engine.quantization.spec import QuantizationSpec
from parallel.group import Group
from parallel.linear import ParallelLinear
from parallel.parameter import Recipe, ShardedParameter, TensorSource, Transfer, WeightSource
from parallel.sharding import kv_head_start, kv_heads_per_rank

logger = logging.getLogger(__name__)

Told = Callable[[float], None]

KV_SCALE = re.compile(r"(layers\.\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale$")


def read_kv_scales(folder: Path, model: CausalLM) -> tuple[Tensor | None, ...]:
    """Return this rank's scales of keys and values for each layer with a cache, [2, kv_heads] fp32.

    None for a layer of no attention, 1.0 where the checkpoint has none. A tensor holds one number for all KV heads of
    a layer or one for each. Raises `CheckpointError` for another shape and for a scale that is no positive number.
    """
    layers = dict(model.attention_paths())
    scales = {path: torch.ones(2, part.all_kv_heads) for path, part in layers.items()}
    checkpoint = Checkpoint(folder)
    try:
        found = [(name, match) for name in sorted(checkpoint.names) if (match := KV_SCALE.search(name))]
        for name, match in found:
            if match[1] not in layers:
                raise CheckpointError(f"{name}: the model has no attention layer {match[1]!r}; remove the tensor")
            scales[match[1]]["kv".index(match[2])] = _read(checkpoint, name, layers[match[1]].all_kv_heads)
    finally:
        checkpoint.close()
    if found:
        logger.info("fp8 KV cache: %d scales from the checkpoint", len(found))
    else:
        logger.warning(
            "fp8 KV cache: the checkpoint brings no k_scale and v_scale, so all are 1.0; "
            "keys and values beyond +-448 are cut off"
        )
    group = model.group
    own = {path: _own(scale, group).to(group.device) for path, scale in scales.items()}
    of_layer = {part.cache_index: own[path] for path, part in model.attention_paths()}
    return tuple(of_layer.get(index) for index in range(len(model.cached)))


def _own(scale: Tensor, group: Group) -> Tensor:
    """Return the scales of this rank's KV heads, of those of all: [2, kv_heads]."""
    heads = scale.shape[1]
    first = kv_head_start(heads, group.rank, group.size)
    return scale[:, first : first + kv_heads_per_rank(heads, group.size)].contiguous()


def _read(checkpoint: Checkpoint, name: str, heads: int) -> Tensor:
    source = checkpoint.source(name)
    scale = source[:].float().flatten()
    if len(scale) not in (1, heads):
        raise CheckpointError(
            f"{source.file.path}: tensor {name} has shape {list(source.shape)}; 1 number or {heads}, "
            "one for each KV head, is expected"
        )
    if not (torch.isfinite(scale) & (scale > 0)).all():
        raise CheckpointError(f"{source.file.path}: tensor {name} holds a scale that is no positive number")
    return scale


# Buffers that some checkpoints saved beside the weights, and layers that predict several tokens at once (Qwen3-Next).
NO_WEIGHTS = re.compile(r"^mtp\.|rotary_emb\.inv_freq$|\.attn\.(bias|masked_bias)$")
# What quantised ones need not be read for: scales of activations, which get their own per token; shapes, which
# config.json says; query scales.
NO_NEED = re.compile(r"\.(input_scale|input_global_scale|weight_shape|q_scale)$")
UNREAD_SCALE = re.compile(r"\.(input_scale|input_global_scale|[qkv]_scale)$")
HEAD = "lm_head.weight"  # saved by some though it is tied
ROWS_COMPARED = 4096
LAYER = re.compile(r"layers\.\d+")
FIRST_NUMBER = re.compile(r"\D*\.\d+(?=\.)")
NAMES_SHOWN = 8


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
    rules = list(model.weights(checkpoint.names))
    wanted = {name for rule in rules for name in rule.names}
    spare = {name for rule in rules for name in rule.spare_names}
    unused = [NO_WEIGHTS, KV_SCALE, *([NO_NEED] if stored else [])]
    if (held := model.stored(checkpoint.names, wanted | spare)) is not None:
        _check_tied_head(model, rules, checkpoint, held.plain)
        extra = {name for name in held.unknown if name != HEAD and not any(each.search(name) for each in unused)}
        refuse_tensors(checkpoint.folder, "not part of this architecture", extra)
        refuse_tensors(checkpoint.folder, "missing", {*held.lacking} - spare)
        _tell_unread(held.unknown)
        _read_all(model, rules, held.plain, checkpoint, told, held.made)
        return
    names = names_on_disk(checkpoint.names, rules)
    others = names.keys() - wanted - {HEAD} - spare
    if any(isinstance(part, Experts) and part.whole for part in model.modules()):
        others -= set(_all_names(config, quantization, checkpoint.names))  # other ranks' experts
    _check_tied_head(model, rules, checkpoint, names)
    refuse_tensors(checkpoint.folder, "missing", wanted - names.keys())
    extra = {
        name
        for name in others
        if not any(pattern.search(name) for pattern in unused)
        and not _is_unused(model, config, name)
        and not (stored and _is_no_bias(checkpoint, names[name]))
    }
    refuse_tensors(checkpoint.folder, "not part of this architecture", extra)
    _tell_unread(others)
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
        num_bytes += _fill(model, plain, checkpoint, names, part)
        for rule in as_it_is:
            if rule.scale:
                _load_scale(model, rule, checkpoint, names[rule.name])
        for rule in batch:
            if rule.recipe is not None:
                num_bytes += _load_by_recipe(model, rule, rule.recipe, checkpoint, names)
        for layer in dict.fromkeys(_layer_of(rule.target) for rule in batch):
            for one in of_layer.pop(layer, ()):
                for name, tensor in one.tensors(lambda source: checkpoint.source(source)[:]).items():
                    found.add(name)
                    num_bytes += tensor.nbytes
                    for rule in by_name.get(name, ()):
                        _load_made(model, rule, tensor, checkpoint.folder)
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


def _all_names(config: ModelConfig, quantization: QuantizationSpec | None, on_disk: Collection[str]) -> Iterator[str]:
    """Yield the names of all tensors of a model, those of other ranks' experts among them."""
    whole = blueprint(config)
    quantize(whole.layers, whole.layers_path, whole.names, quantization)
    for rule in whole.weights(on_disk):
        yield from (*rule.names, *rule.spare_names)


def _is_no_bias(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is a bias of zeros: AutoGPTQ wrote one for every layer, those without a bias among them."""
    return name.endswith(".bias") and not bool(checkpoint.source(name)[:].any())


def _tell_unread(names: Iterable[str]) -> None:
    """Say once which scales of a quantised checkpoint nothing is made of."""
    found = Counter(name.rpartition(".")[2] for name in names if UNREAD_SCALE.search(name))
    if found:
        logger.info(
            "not read: %s. Activations get scales of their own, per token, or none; those of keys and values are for "
            "kv_cache_dtype=fp8",
            ", ".join(f"{count} {leaf}" for leaf, count in sorted(found.items())),
        )


def _is_unused(model: CausalLM, config: ModelConfig, name: str) -> bool:
    """Whether a tensor is of a layer beyond the model's own that its family does not run."""
    found = LAYER.search(name)
    layer = -1 if found is None else int(found[0].removeprefix("layers."))
    return layer >= config.num_layers and model.is_unused(config, layer)


def _finish(modules: Iterable[nn.Module]) -> None:
    """Let the linear layers among these make what they need of what was loaded."""
    for layer in modules:
        if isinstance(layer, ParallelLinear):
            layer.order_rows()
            layer.method.load(layer)


def _check_tied_head(
    model: CausalLM, rules: list[WeightRule], checkpoint: Checkpoint, names: Mapping[str, str]
) -> None:
    """Refuse a head in the checkpoint that is tied to the embedding by config.json and yet another.

    names: in the rules -> on disk.
    """
    if model.head.weight is not model.table or HEAD not in checkpoint.names:
        return
    tied = next(rule.name for rule in rules if model.get_parameter(rule.target) is model.table)
    if tied not in names:
        return  # it is reported with the others that are missing
    table, head = checkpoint.source(names[tied]), checkpoint.source(HEAD)
    rows = range(0, head.shape[0], ROWS_COMPARED)
    if head.shape != table.shape or not all(
        torch.equal(head[first : first + ROWS_COMPARED], table[first : first + ROWS_COMPARED]) for first in rows
    ):
        raise CheckpointError(
            f"{checkpoint.folder}: {HEAD} differs from the embedding, which config.json ties it to; set "
            "tie_word_embeddings to false"
        )


def _load_made(model: CausalLM, rule: WeightRule, tensor: Tensor, folder: Path) -> None:
    if rule.index is not None and rule.index < len(tensor):
        tensor = tensor[rule.index]
    if tuple(tensor.shape) != rule.shape:
        raise CheckpointError(
            f"{folder}: tensor {rule.name} is made with shape {list(tensor.shape)}, config.json makes it "
            f"{list(rule.shape)}"
        )
    _sharded(model.get_parameter(rule.target), rule).load(TensorSource(tensor), rule.part, rule.transposed)


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


def _fill(
    model: CausalLM, rules: list[WeightRule], checkpoint: Checkpoint, names: Mapping[str, str], told: Told
) -> int:
    parameters = dict(model.named_parameters())
    reads = [read for rule in rules for read in _reads(parameters[rule.target], rule, checkpoint, names[rule.name])]
    num_bytes = fill(reads, model.group.device, model.group.size, told)
    for rule in rules:
        _sharded(parameters[rule.target], rule).mark_loaded(rule.part)
    return num_bytes


def _load_scale(model: CausalLM, rule: WeightRule, checkpoint: Checkpoint, name: str) -> None:
    source = checkpoint.source(name)
    scales = ScaleSource(source, rule.shape[0])
    if tuple(scales.get_shape()) != rule.shape:
        raise CheckpointError(
            f"{source.file.path}: tensor {name} has shape {list(source.shape)}, and a scale for each of "
            f"{rule.shape[0]} rows or a single one is wanted"
        )
    _sharded(model.get_parameter(rule.target), rule).load(scales, rule.part)


def _load_by_recipe(
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
        if source.dtype not in wanted.dtypes:
            dtypes = " or ".join(str(dtype).removeprefix("torch.") for dtype in wanted.dtypes)
            raise CheckpointError(f"{source.file.path}: tensor {name} is of {source.dtype}, not {dtypes}")
        tensors[leaf] = source[:]
    try:
        made = recipe.make(tensors)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.folder}: tensor {rule.stem}{error}") from error
    _sharded(model.get_parameter(rule.target), rule).load(TensorSource(made), rule.part)
    return sum(tensor.nbytes for tensor in tensors.values())


class ScaleSource(WeightSource):
    """Scales on disk as one per row: from (rows, 1) or (rows,), or a single one for all."""

    def __init__(self, source: WeightSource, rows: int) -> None:
        self._scales = source[:].flatten()
        self._rows = rows

    def get_shape(self) -> Sequence[int]:
        """Return (rows,), or what is there where that is neither one nor as many."""
        return (self._rows if len(self._scales) == 1 else len(self._scales),)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        return self._scales.expand(self.get_shape()[0])[index]


def _reads(
    parameter: torch.nn.Parameter, rule: WeightRule, checkpoint: Checkpoint, name: str
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


def _sharded(parameter: torch.nn.Parameter, rule: WeightRule) -> ShardedParameter:
    if not isinstance(parameter, ShardedParameter):
        raise TypeError(f"{rule.target} is no parameter that can load itself")
    return parameter


def names_on_disk(names: Iterable[str], rules: list[WeightRule]) -> dict[str, str]:
    """Return name in the rules -> name on disk; some checkpoints were saved without the outer module's prefix."""
    prefix = rules[0].name.split(".")[0] + "."
    if any(name.startswith(prefix) for name in names):
        return {name: name for name in names}
    return {(name if name == HEAD else prefix + name): name for name in names}


def refuse_tensors(folder: Path, what: str, names: Iterable[str]) -> None:
    """Raise `CheckpointError` where there are any such tensors. what: is the matter with them."""
    shown = sorted(names)
    if shown:
        more = f" and {len(shown) - NAMES_SHOWN} more" if len(shown) > NAMES_SHOWN else ""
        raise CheckpointError(f"{folder}: tensors {what}: {', '.join(shown[:NAMES_SHOWN])}{more}")
