"""Phi 3 and 4: Llama whose checkpoints hold queries, keys and values in one tensor, and gate and up in another."""

from __future__ import annotations

from typing_extensions import override

from engine.layers.base import Build
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLM, Stack
from engine.models.llama import LLAMA_NAMES, llama_stack


class Phi3(DecoderLM):
    """Phi3ForCausalLM, which Phi-4 and Phi-4-mini are, too."""

    names = LLAMA_NAMES | {
        "layers.*.attention.qkv": "model.layers.*.self_attn.qkv_proj",
        "layers.*.mlp.up": "model.layers.*.mlp.gate_up_proj",
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        window = config.hf.integer("sliding_window", 0, low=0)
        return llama_stack(config, build, windows=[window] * config.num_layers, fraction=1.0)
