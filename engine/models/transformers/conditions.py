"""What a model of transformers must be for a paged cache to give its own tokens; see `docs/guides/models.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from engine.errors import CheckpointError
from engine.models.transformers.attention import Call

KINDS = ("full_attention", "sliding_attention")
BY_LENGTH = ("longrope", "dynamic")  # ropes that change with the longest sequence of a step
WINDOW_MASK = "create_sliding_window_causal_mask"


def check_config(config: PreTrainedConfig, max_positions: int) -> None:
    """Refuse what a config asks for that the cache does not have. max_positions: tokens of the longest sequence.

    Raises `CheckpointError`.
    """
    if getattr(config, "is_decoder", False):
        raise CheckpointError("config.json: is_decoder: an encoder that is used as a decoder is not supported")
    chunk = getattr(config, "attention_chunk_size", None) or 0
    kinds = set(getattr(config, "layer_types", None) or KINDS) - set(KINDS)
    if max_positions <= chunk:
        kinds.discard("chunked_attention")  # a sequence that fits its first chunk sees all of it
    if "chunked_attention" in kinds:
        raise CheckpointError(f"config.json: layer_types has chunked_attention; set max_model_len to {chunk}")
    if kinds:
        raise CheckpointError(
            f"config.json: layer_types has {', '.join(sorted(kinds))}; through transformers only "
            f"{' and '.join(KINDS)} are served"
        )
    for rope in _ropes(config):
        kind = rope.get("rope_type", rope.get("type"))
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if kind in BY_LENGTH and max_positions > original:
            raise CheckpointError(
                f"config.json: rope_type {kind!r} rotates by the longest sequence beyond {original} tokens, so that "
                f"tokens would depend on their company; set max_model_len to {original}"
            )


def check_calls(model: PreTrainedModel, calls: Sequence[Call], window_masks: int, max_positions: int) -> None:
    """Refuse a model by what its layers asked of attention. window_masks: times that it asked for a mask of a window.

    Raises `CheckpointError`.
    """
    config, name = model.config.get_text_config(), type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise CheckpointError(
            f"config.json: {name} keeps a recurrent state, which is not served through transformers"
        )
    if len(calls) < config.num_hidden_layers:
        raise CheckpointError(
            f"config.json: {name} attends in {len(calls)} of {config.num_hidden_layers} layers through transformers' "
            "AttentionInterface; all must"
        )
    window = getattr(config, "sliding_window", None) or 0
    if not 0 < window < max_positions:
        return
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        unseen = window_masks and not any(call.window for call in calls)
    else:
        layers = zip(kinds, calls, strict=False)
        unseen = any(kind == "sliding_attention" and not call.window for kind, call in layers)
    if unseen:
        raise CheckpointError(
            f"config.json: {name} tells its window of {window} tokens to a mask alone, not to attention; set "
            f"max_model_len to {window}"
        )


@contextmanager
def counted_window_masks(model: PreTrainedModel) -> Iterator[list[int]]:
    """Count in the one number of the list how often a model asks for the mask of a sliding window meanwhile."""
    count = [0]
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    patched = {module: vars(module)[WINDOW_MASK] for module in modules if WINDOW_MASK in vars(module)}

    def counted(*_: Any, **__: Any) -> None:
        count[0] += 1

    for module in patched:
        setattr(module, WINDOW_MASK, counted)
    try:
        yield count
    finally:
        for module, plain in patched.items():
            setattr(module, WINDOW_MASK, plain)


def _ropes(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each rope, one for all layers or one for each type of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in given.values() if isinstance(value, Mapping)]
    yield from nested or [given]
