"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from typing_extensions import override

from engine.layers.base import Build
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLM, Stack
from engine.models.llama import LLAMA_NAMES, llama_stack


class Mistral(DecoderLM):
    """MistralForCausalLM."""

    names = LLAMA_NAMES

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        config.hf.refuse("layer_types", None)
        window = config.hf.integer("sliding_window", 0, low=0)
        return llama_stack(config, build, windows=[window] * config.num_layers)
