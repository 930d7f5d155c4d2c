"""StableLM, StableLM 2: LayerNorm, a part of each head is rotated, attention beside the feed-forward in some."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from typing_extensions import override

from engine.errors import CheckpointError
from engine.layers.base import Build, Names
from engine.layers.norm import LayerNorm
from engine.layers.rope import Rotary
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLayer, DecoderLM, ParallelLayer, Stack
from engine.models.llama import LLAMA_NAMES, gated_mlp, llama_attention
from engine.models.rope_config import read_rope

ROTATED = 0.25  # part of a head, where config.json says nothing


class StableLm(DecoderLM):
    """StableLmForCausalLM."""

    names: ClassVar[Names] = LLAMA_NAMES | {
        "layers.*.norm": "model.layers.*.input_layernorm",  # of a parallel layer, which has no other
        "layers.*.attention.q_norm.norms.*": "model.layers.*.self_attn.q_layernorm.norms.*",
        "layers.*.attention.k_norm.norms.*": "model.layers.*.self_attn.k_layernorm.norms.*",
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        hf, hidden = config.hf, config.hidden_size
        heads = hf.integer("num_attention_heads")
        if hidden % heads:
            raise CheckpointError(
                f"config.json: hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}"
            )
        size = hidden // heads
        hf.refuse("head_dim", size)
        eps = hf.number("layer_norm_eps", 1e-5)
        biased, normed = hf.flag("use_qkv_bias"), hf.flag("qk_layernorm")
        parallel = hf.flag("use_parallel_residual")
        rotary = Rotary(read_rope(hf, size, build.max_positions, fraction=ROTATED), size, build)

        def layer() -> nn.Module:
            attention = llama_attention(
                config,
                build,
                size,
                rotary=rotary,
                qkv_bias=biased,
                head_norm_eps=eps if normed else None,
                norm_each=True,
            )
            norm, mlp = LayerNorm(hidden, eps, build), gated_mlp(config, build)
            if parallel:
                return ParallelLayer(norm, attention, mlp)
            return DecoderLayer(norm, attention, LayerNorm(hidden, eps, build), mlp)

        return Stack(
            [layer() for _ in range(config.num_layers)],
            LayerNorm(hidden, eps, build),
            tied=hf.flag("tie_word_embeddings"),
        )
