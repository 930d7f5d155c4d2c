"""What a model of transformers must be for a paged cache to give its own tokens; see `docs/guides/models.md`."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from engine.errors import CheckpointError
from engine.models.transformers.attention import Call

LAYER = re.compile(r"(?P<list>.*?)\.(?P<layer>\d+)\.")
KINDS = ("full_attention", "sliding_attention")
BY_LENGTH = ("longrope", "dynamic")  # ropes that change with the longest sequence of a step
WINDOW_MASK, CAUSAL_MASK = "create_sliding_window_causal_mask", "create_causal_mask"
MASKS = (WINDOW_MASK, CAUSAL_MASK, "create_bidirectional_mask")
# Layers that see all of a sequence which is no longer than a field says: of one chunk, or all that an indexer picks.
LIMITED = {"chunked_attention": "attention_chunk_size", "indexed_attention": "index_topk"}


def check_config(config: PreTrainedConfig, max_positions: int) -> None:
    """Refuse what a config asks for that the cache does not have. max_positions: tokens of the longest sequence.

    Raises `CheckpointError`.
    """
    if getattr(config, "attention_type", None) == "block_sparse":
        raise CheckpointError("config.json: attention_type is block_sparse: longer texts are seen in blocks")
    kinds = set(getattr(config, "layer_types", None) or KINDS) - set(KINDS)
    for kind, field in LIMITED.items():
        limit = getattr(config, field, None) or 0
        if max_positions <= limit:
            kinds.discard(kind)
        if kind in kinds and limit:
            raise CheckpointError(f"config.json: layer_types has {kind}; set max_model_len to {limit}")
    if kinds:
        raise CheckpointError(
            f"config.json: layer_types has {', '.join(sorted(kinds))}; through transformers only "
            f"{' and '.join(KINDS)} are served"
        )
    for rope in _ropes(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind not in BY_LENGTH:
            continue
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if max_positions > original:
            raise CheckpointError(
                f"config.json: rope_type {kind!r} rotates by the longest sequence beyond {original} tokens, so that "
                f"tokens would depend on their company; set max_model_len to {original}"
            )


def check_calls(model: PreTrainedModel, calls: Sequence[Call], masks: Counter[str], max_positions: int) -> None:
    """Refuse a model by what its layers asked of attention. masks: how often it asked for which, by `MASKS`.

    Raises `CheckpointError`.
    """
    config, name = model.config.get_text_config(), type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise CheckpointError(
            f"config.json: {name} keeps a recurrent state, which is not served through transformers"
        )
    layers = num_layers(config)
    attending = len({call.path for call in calls})
    if len(calls) < layers or (attending < layers and not _attends_in_each(model, calls)):
        raise CheckpointError(
            f"config.json: {name} attends in {attending} of {layers} layers in a way that is known; all must"
        )
    if any(call.written_out for call in calls) and {*masks} != {CAUSAL_MASK}:
        raise CheckpointError(f"config.json: {name} writes out attention that is not causal alone")
    window = getattr(config, "sliding_window", None) or 0
    if not 0 < window < max_positions:
        return
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        unseen = masks[WINDOW_MASK] and not any(call.window for call in calls)
    else:
        first = zip(kinds, (call for call in calls if not call.turn), strict=False)
        unseen = any(kind == "sliding_attention" and not call.window for kind, call in first)
    if unseen:
        raise CheckpointError(
            f"config.json: {name} tells its window of {window} tokens to a mask alone, not to attention; set "
            f"max_model_len to {window}"
        )


def _attends_in_each(model: PreTrainedModel, calls: Sequence[Call]) -> bool:
    """Whether of each list of layers that has one that attends all do, as those that are run in loops."""
    lists: defaultdict[str, set[str]] = defaultdict(set)
    for call in calls:
        if found := LAYER.match(call.path):
            lists[found["list"]].add(found["layer"])
    return all(len(layers) == len(list(model.get_submodule(path).children())) for path, layers in lists.items())


def picks_tokens(config: PreTrainedConfig) -> bool:
    """Whether layers have indexers, which pick the tokens that attention sees."""
    return "indexed_attention" in (getattr(config, "layer_types", None) or ())


def num_layers(config: PreTrainedConfig) -> int:
    """Return how many layers attend to a text: of a decoder with an encoder, and without those for images alone."""
    others = getattr(config, "cross_attention_layers", None) or ()
    return int(getattr(config, "decoder_layers", None) or config.num_hidden_layers) - len(others)


@contextmanager
def counted_masks(model: PreTrainedModel) -> Iterator[Counter[str]]:
    """Count how often a model asks for which mask meanwhile; it gets none."""
    count: Counter[str] = Counter()
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    patched = {(module, name): vars(module)[name] for module in modules for name in MASKS if name in vars(module)}

    def counted(name: str, *_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
        count[name] += 1
        return attention_mask if attention_mask is not None and attention_mask.ndim == 4 else None

    for module, name in patched:
        setattr(module, name, partial(counted, name))
    try:
        yield count
    finally:
        for (module, name), plain in patched.items():
            setattr(module, name, plain)


def _ropes(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each rope, one for all layers or one for each type of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in given.values() if isinstance(value, Mapping)]
    yield from nested or [given]
