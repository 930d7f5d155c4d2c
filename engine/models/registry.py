"""Which architectures this engine serves: name in config.json -> spec and names of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import CheckpointError
from engine.models.hf_config import MAX_LAYERS, HFConfig
from engine.models.spec import DecoderSpec
from engine.models.weight_map import WeightRule, gpt2_weights, llama_weights
from engine.quantization.config import read_quantization


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to read one family of checkpoints.

    spec: config.json -> spec. weights: spec -> every tensor that the checkpoint must have.
    """

    spec: Callable[[HFConfig], DecoderSpec]
    weights: Callable[[DecoderSpec], Iterator[WeightRule]]


def architecture_of(config: Mapping[str, Any]) -> tuple[Architecture, DecoderSpec]:
    """Return the architecture that a parsed config.json names, and its spec.

    Raises `CheckpointError` for an unknown architecture or a setting that is not implemented, by name.
    """
    reader = HFConfig(config)
    architecture = ARCHITECTURES.get(reader.architecture)
    if architecture is None:
        raise CheckpointError(
            f"config.json: architecture {reader.architecture!r} is not supported; known: {', '.join(ARCHITECTURES)}"
        )
    return architecture, replace(architecture.spec(reader), quantization=read_quantization(config))


def _common(config: HFConfig) -> dict[str, Any]:
    """Return what Llama and its descendants share; their configs use the same field names."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    bos = config.token_ids("bos_token_id")
    return {
        "architecture": config.architecture,
        "hidden_size": hidden,
        "num_layers": config.num_layers,
        "num_heads": heads,
        "num_kv_heads": config.integer("num_key_value_heads", heads),
        "intermediate_size": config.integer("intermediate_size"),
        "vocab_size": config.integer("vocab_size"),
        "max_positions": config.integer("max_position_embeddings"),
        "norm": "rms",
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "activation": config.activation("hidden_act", "silu"),
        "gated_mlp": True,
        "tied_embeddings": config.flag("tie_word_embeddings"),
        "checkpoint_dtype": config.dtype,
        "eos_token_ids": config.token_ids("eos_token_id"),
        "bos_token_id": bos[0] if bos else None,
    }


def _llama(config: HFConfig) -> DecoderSpec:
    values = _common(config)
    head_dim = config.integer("head_dim", values["hidden_size"] // values["num_heads"])
    bias = config.flag("attention_bias")
    return DecoderSpec(
        **values,
        head_dim=head_dim,
        rope=config.rope(head_dim),
        sliding_windows=(0,) * values["num_layers"],
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
    )


def _mistral(config: HFConfig) -> DecoderSpec:
    values = _common(config)
    head_dim = config.integer("head_dim", values["hidden_size"] // values["num_heads"])
    config.refuse("layer_types", None)
    window = config.integer("sliding_window", 0, low=0)
    return DecoderSpec(
        **values, head_dim=head_dim, rope=config.rope(head_dim), sliding_windows=(window,) * values["num_layers"]
    )


def _qwen2(config: HFConfig) -> DecoderSpec:
    values = _common(config)
    head_dim = config.integer("head_dim", values["hidden_size"] // values["num_heads"])
    return DecoderSpec(
        **values,
        head_dim=head_dim,
        rope=config.rope(head_dim),
        sliding_windows=config.layer_windows(values["num_layers"]),
        qkv_bias=True,
    )


def _qwen3(config: HFConfig) -> DecoderSpec:
    values = _common(config)
    head_dim = config.integer("head_dim", 128)
    bias = config.flag("attention_bias")
    return DecoderSpec(
        **values,
        head_dim=head_dim,
        rope=config.rope(head_dim),
        sliding_windows=config.layer_windows(values["num_layers"]),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )


def _gpt2(config: HFConfig) -> DecoderSpec:
    for name, allowed in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        config.refuse(name, allowed)
    hidden, heads = config.integer("n_embd", 768), config.integer("n_head", 12)
    if hidden % heads:
        raise CheckpointError(f"config.json: n_embd = {hidden} is not a multiple of n_head = {heads}")
    layers = config.integer("n_layer", 12, high=MAX_LAYERS)
    bos = config.token_ids("bos_token_id", 50256)
    return DecoderSpec(
        architecture=config.architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=config.integer("n_inner", 4 * hidden),
        vocab_size=config.integer("vocab_size", 50257),
        max_positions=config.integer("n_positions", 1024),
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        activation=config.activation("activation_function", "gelu_new"),
        gated_mlp=False,
        rope=None,
        sliding_windows=(0,) * layers,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        checkpoint_dtype=config.dtype,
        eos_token_ids=config.token_ids("eos_token_id", 50256),
        bos_token_id=bos[0] if bos else None,
    )


ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(_llama, llama_weights),
    "Qwen2ForCausalLM": Architecture(_qwen2, llama_weights),
    "Qwen3ForCausalLM": Architecture(_qwen3, llama_weights),
    "MistralForCausalLM": Architecture(_mistral, llama_weights),
    "GPT2LMHeadModel": Architecture(_gpt2, gpt2_weights),
}
