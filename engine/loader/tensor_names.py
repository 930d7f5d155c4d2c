"""Which tensors of a checkpoint a model is made of, under which names; all others are known or refused."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from engine.errors import CheckpointError
from engine.layers.base import WeightRule
from engine.loader.safetensors_file import Checkpoint
from engine.models.blueprint import blueprint
from engine.models.causal_lm import CausalLM
from engine.models.config import ModelConfig
from engine.quantization.select import quantize
from engine.quantization.spec import QuantizationSpec

logger = logging.getLogger(__name__)

# Buffers that some checkpoints saved beside the weights, and layers that predict several tokens at once (Qwen3-Next).
NO_WEIGHTS = re.compile(r"^mtp\.|rotary_emb\.inv_freq$|\.attn\.(bias|masked_bias)$")
# What quantised ones need not be read for: scales and zeros of activations, which get their own per token or stay
# plain; shapes, which config.json says; query scales.
NO_NEED = re.compile(r"\.(input_scale|input_zero_point|input_global_scale|weight_shape|q_scale)$")
UNREAD_SCALE = re.compile(r"\.(input_scale|input_zero_point|input_global_scale|[qkv]_scale)$")
# What transformers calls scales of fp8, one for a whole tensor, as Mistral ships them -> what all others do.
SCALES_OF_TENSORS = {".weight_scale_inv": ".weight_scale", ".activation_scale": ".input_scale"}
HEAD = "lm_head.weight"  # saved by some though it is tied
ROWS_COMPARED = 4096
LAYER = re.compile(r"layers\.\d+")
NAMES_SHOWN = 8


def names_on_disk(names: Iterable[str], rules: list[WeightRule]) -> dict[str, str]:
    """Return name in the rules -> name on disk; some checkpoints were saved without the outer module's prefix."""
    prefix = rules[0].name.split(".")[0] + "."
    if any(name.startswith(prefix) for name in names):
        return {name: name for name in names}
    return {(name if name == HEAD else prefix + name): name for name in names}


def usual_scale_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names of tensors in fp8 with one scale each, as most checkpoints have them -> name on disk.

    Raises `CheckpointError` for a tensor that is there under two names.
    """
    found: dict[str, str] = {}
    for name in sorted(names):
        leaf = next((leaf for leaf in SCALES_OF_TENSORS if name.endswith(leaf)), "")
        usual = name.removesuffix(leaf) + SCALES_OF_TENSORS.get(leaf, "")
        if usual in found:
            raise CheckpointError(f"the checkpoint holds {usual} twice: {found[usual]} and {name}")
        found[usual] = name
    return found


def all_names(config: ModelConfig, quantization: QuantizationSpec | None, on_disk: Collection[str]) -> Iterator[str]:
    """Yield the names of all tensors of a model, those of other ranks' experts among them."""
    whole = blueprint(config)
    quantize(whole.layers, whole.layers_path, whole.names, quantization)
    for rule in whole.weights(on_disk):
        yield from (*rule.names, *rule.spare_names)


def is_no_bias(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is a bias of zeros: AutoGPTQ wrote one for every layer, those without a bias among them."""
    return name.endswith(".bias") and not bool(checkpoint.source(name)[:].any())


def is_unused(model: CausalLM, config: ModelConfig, name: str) -> bool:
    """Whether a tensor is of a layer beyond the model's own that its family does not run."""
    found = LAYER.search(name)
    layer = -1 if found is None else int(found[0].removeprefix("layers."))
    return layer >= config.num_layers and model.is_unused(config, layer)


def tell_unread(names: Iterable[str]) -> None:
    """Say once which scales of a quantised checkpoint nothing is made of."""
    found = Counter(name.rpartition(".")[2] for name in names if UNREAD_SCALE.search(name))
    if found:
        logger.info(
            "not read: %s. Activations get scales of their own, per token, or none; those of keys and values are for "
            "kv_cache_dtype=fp8",
            ", ".join(f"{count} {leaf}" for leaf, count in sorted(found.items())),
        )


def check_tied_head(
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


def refuse_tensors(folder: Path, what: str, names: Iterable[str]) -> None:
    """Raise `CheckpointError` where there are any such tensors. what: is the matter with them."""
    shown = sorted(names)
    if shown:
        more = f" and {len(shown) - NAMES_SHOWN} more" if len(shown) > NAMES_SHOWN else ""
        raise CheckpointError(f"{folder}: tensors {what}: {', '.join(shown[:NAMES_SHOWN])}{more}")
