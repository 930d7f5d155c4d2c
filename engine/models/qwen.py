"""Qwen 2 and 3: Llama with a sliding window in some layers; Qwen 2 with biases, Qwen 3 with norms of each head."""

from __future__ import annotations

from typing_extensions import override

from engine.layers.base import Build
from engine.models.config import HFConfig, ModelConfig
from engine.models.decoder import DecoderLM, Stack
from engine.models.llama import LLAMA_NAMES, llama_stack

LAYER_TYPES = ("full_attention", "sliding_attention")


class Qwen2(DecoderLM):
    """Qwen2ForCausalLM."""

    names = LLAMA_NAMES

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        return llama_stack(config, build, windows=layer_windows(config.hf, config.num_layers), qkv_bias=True)


class Qwen3(DecoderLM):
    """Qwen3ForCausalLM."""

    names = LLAMA_NAMES | {
        "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
        "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        bias, windows = config.hf.flag("attention_bias"), layer_windows(config.hf, config.num_layers)
        return llama_stack(config, build, 128, windows, qkv_bias=bias, output_bias=bias, head_norms=True)


def layer_windows(hf: HFConfig, num_layers: int, *, alternating: bool = False) -> tuple[int, ...]:
    """Return each layer's window, 0 = none: of `use_sliding_window`, `layer_types` and `max_window_layers`.

    alternating: whether without `layer_types` every second layer before `max_window_layers` has it (Qwen2-MoE), not
    those from there on.
    """
    window = read_window(hf)
    types = hf.layer_types(LAYER_TYPES, num_layers)
    if types is None:
        first = hf.integer("max_window_layers", 28, low=0)
        has_it = [layer < first and not layer % 2 if alternating else layer >= first for layer in range(num_layers)]
        return tuple(window * has for has in has_it)
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def read_window(hf: HFConfig) -> int:
    """Return the window of the layers that have one, 0 = none has."""
    if not hf.flag("use_sliding_window") or "sliding_window" in hf.nulls:
        return 0
    return hf.integer("sliding_window", 4096)
