"""OLMo 2 and 3: norms after attention and feed-forward, queries and keys normed over all heads together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from engine.layers.base import Build
from engine.layers.norm import RMSNorm
from engine.layers.rope import RopeSpec, Rotary
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLM, NormedAfterLayer, Stack
from engine.models.gemma import layer_types
from engine.models.llama import LLAMA_NAMES, gated_mlp, llama_attention, read_head_dim
from engine.models.rope_config import is_nested, read_rope

OLMO_NAMES = LLAMA_NAMES | {
    "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    "layers.*.after_attention": "model.layers.*.post_attention_layernorm",
    "layers.*.after_mlp": "model.layers.*.post_feedforward_layernorm",
}


class Olmo2(DecoderLM):
    """Olmo2ForCausalLM."""

    names = OLMO_NAMES

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        size = read_head_dim(config)
        rotary = Rotary(read_rope(config.hf, size, build.max_positions), size, build)
        return olmo_stack(config, build, ["full_attention"] * config.num_layers, {"full_attention": rotary})


class Olmo3(DecoderLM):
    """Olmo3ForCausalLM: three of four layers see a window; the others alone are stretched for long texts."""

    names = OLMO_NAMES

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        hf, size = config.hf, read_head_dim(config)
        stretched = read_rope(hf, size, build.max_positions, "full_attention", theta=5e5)
        if is_nested(hf):
            plain = read_rope(hf, size, build.max_positions, "sliding_attention", theta=5e5)
        else:
            plain = RopeSpec(hf.number("rope_theta", 5e5))
        rotaries = {
            "full_attention": Rotary(stretched, size, build),
            "sliding_attention": Rotary(plain, size, build),
        }
        return olmo_stack(config, build, layer_types(config, every=4), rotaries)


def olmo_stack(config: ModelConfig, build: Build, types: Sequence[str], rotaries: Mapping[str, Rotary]) -> Stack:
    """Return the layers of OLMo. rotaries: by what a layer is."""
    hf, hidden = config.hf, config.hidden_size
    eps, bias = hf.number("rms_norm_eps", 1e-5), hf.flag("attention_bias")
    window = hf.integer("sliding_window", 4096)
    layers = [
        NormedAfterLayer(
            llama_attention(
                config,
                build,
                read_head_dim(config),
                rotary=rotaries[kind],
                window=window if kind == "sliding_attention" else 0,
                qkv_bias=bias,
                output_bias=bias,
                head_norm_eps=eps,
                norm_heads=False,
            ),
            RMSNorm(hidden, eps, build),
            gated_mlp(config, build),
            RMSNorm(hidden, eps, build),
        )
        for kind in types
    ]
    return Stack(layers, RMSNorm(hidden, eps, build), tied=hf.flag("tie_word_embeddings"))
