"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without positions, a feed-forward, or experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from typing_extensions import override

from engine.attention.base import AttentionContext
from engine.errors import CheckpointError, UnsupportedFieldError
from engine.layers.base import Build, Layer, Names
from engine.layers.mamba import Mamba2, MambaSizes
from engine.layers.mlp import ACTIVATIONS, MLP
from engine.layers.moe import MoE, Routing
from engine.layers.norm import RMSNorm
from engine.models.config import HFConfig, ModelConfig
from engine.models.decoder import DecoderLM, Stack
from engine.models.granite_moe import read_time_limits
from engine.models.llama import llama_attention

# Of `layers_block_type`, as transformers 5 and 4 spell it, and of the letters of `hybrid_override_pattern`.
KINDS: Mapping[str, str] = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "M": "mamba",
    "full_attention": "attention",
    "attention": "attention",
    "*": "attention",
    "mlp": "mlp",
    "-": "mlp",
    "moe": "moe",
    "E": "moe",
}
MIXER = "backbone.layers.*.mixer"


class MixerLayer(nn.Module):
    """One mixer with a norm before it. attends: whether it looks at other tokens, too."""

    def __init__(self, norm: RMSNorm, mixer: Layer, *, attends: bool) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer
        self.attends = attends

    def forward(
        self, residual: Tensor, update: Tensor | None, rotations: Mapping[Layer, Any], context: AttentionContext
    ) -> Tensor:
        """As of `DecoderLayer`."""
        x = self.norm.add(residual, update)
        mixed: Tensor = self.mixer(x, rotations, context) if self.attends else self.mixer(x)
        return mixed


class NemotronH(DecoderLM):
    """NemotronHForCausalLM."""

    names: ClassVar[Names] = {
        "embedding": "backbone.embeddings",
        "layers.*.norm": "backbone.layers.*.norm",
        "layers.*.mixer.qkv": tuple(f"{MIXER}.{part}_proj" for part in "qkv"),
        "layers.*.mixer.output": f"{MIXER}.o_proj",
        "layers.*.mixer.input": f"{MIXER}.in_proj",
        "layers.*.mixer.conv": f"{MIXER}.conv1d",
        "layers.*.mixer.decay_log": f"{MIXER}.A_log",
        "layers.*.mixer.time_bias": f"{MIXER}.dt_bias",
        "layers.*.mixer.skip": f"{MIXER}.D",
        "layers.*.mixer.norm": f"{MIXER}.norm",
        "layers.*.mixer.result": f"{MIXER}.out_proj",
        "layers.*.mixer.up": f"{MIXER}.up_proj",
        "layers.*.mixer.down": f"{MIXER}.down_proj",
        "layers.*.mixer.router.linear": f"{MIXER}.gate",
        "layers.*.mixer.router.correction": f"{MIXER}.gate.e_score_correction_bias",
        "layers.*.mixer.experts.up.*": f"{MIXER}.experts.*.up_proj",
        "layers.*.mixer.experts.down.*": f"{MIXER}.experts.*.down_proj",
        "layers.*.mixer.shared.up": f"{MIXER}.shared_experts.up_proj",
        "layers.*.mixer.shared.down": f"{MIXER}.shared_experts.down_proj",
        "layers.*.mixer.to_latent": f"{MIXER}.fc1_latent_proj",
        "layers.*.mixer.from_latent": f"{MIXER}.fc2_latent_proj",
        "norm": "backbone.norm_f",
        "head": "lm_head",
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        hf, hidden, eps = config.hf, config.hidden_size, config.hf.number("layer_norm_epsilon", 1e-5)
        for unused in ("attention_bias", "residual_in_fp32"):
            hf.refuse(unused, False)
        hf.refuse("sliding_window", None)
        activation = hf.choice("mlp_hidden_act", ACTIVATIONS, "relu2")

        def mixer(kind: str) -> Layer:
            if kind == "mamba":
                return mamba(config, build, eps)
            if kind == "attention":
                return llama_attention(config, build, hf.integer("head_dim", 128))
            if kind == "mlp":
                return MLP(hidden, hf.integer("intermediate_size"), activation, build, bias=hf.flag("mlp_bias"))
            hf.refuse("mlp_bias", False)
            return MoE(
                hidden,
                hf.integer("moe_intermediate_size"),
                activation,
                read_routing(hf),
                build,
                shared_inner=hf.integer("moe_shared_expert_intermediate_size", 7688),
                gated=False,
                latent=hf.integer("moe_latent_size", 0, low=0),
            )

        layers = [
            MixerLayer(RMSNorm(hidden, eps, build), mixer(kind), attends=kind in ("mamba", "attention"))
            for kind in layer_kinds(hf, config.num_layers)
        ]
        return Stack(layers, RMSNorm(hidden, eps, build), tied=hf.flag("tie_word_embeddings"))


def layer_kinds(hf: HFConfig, num_layers: int) -> list[str]:
    """Return what each layer is, of the values of `KINDS`."""
    for name in ("layers_block_type", "hybrid_override_pattern"):
        found = hf.get(name)
        if found is None:
            continue
        if not isinstance(found, list | str) or len(found) != num_layers:
            raise CheckpointError(f"config.json: {name} must name {num_layers} layers, as num_hidden_layers says")
        for kind in found:
            if kind not in KINDS:
                raise UnsupportedFieldError(
                    f"config.json: {name} has {kind!r}, which is not supported; known: {', '.join(KINDS)}"
                )
        return [KINDS[kind] for kind in found]
    raise CheckpointError("config.json: layers_block_type must name the kind of each layer")


def mamba(config: ModelConfig, build: Build, eps: float) -> Mamba2:
    """Return a layer's Mamba-2, as config.json describes it.

    Rates are held to `time_step_limit`, as NVIDIA's own code does; transformers holds those of prompts, and not of
    the tokens after them, to at least `time_step_min`.
    """
    hf = config.hf
    hf.choice("mamba_hidden_act", ("silu",), "silu")
    bias = hf.flag("use_bias")
    heads, width = hf.integer("mamba_num_heads", 128), hf.integer("mamba_head_dim", 64)
    return Mamba2(
        config.hidden_size,
        MambaSizes(heads, hf.integer("n_groups", 8), width, hf.integer("ssm_state_size", 128)),
        hf.integer("conv_kernel", 4),
        eps,
        build,
        time_limits=read_time_limits(hf),
        conv_bias=hf.flag("use_conv_bias", True),
        bias=bias,
    )


def read_routing(hf: HFConfig) -> Routing:
    """Return how experts are chosen: by sigmoids with a correction, of the best groups (DeepSeek-V3)."""
    count, groups = hf.integer("n_routed_experts", 8), hf.integer("n_group", 1)
    kept = hf.integer("topk_group", 1)
    if count % groups or kept > groups:
        raise CheckpointError(
            f"config.json: n_routed_experts = {count} must be of topk_group = {kept} of n_group = {groups} groups of "
            "one size"
        )
    return Routing(
        count,
        hf.integer("num_experts_per_tok", 2),
        scores="sigmoid",
        renormalise=hf.flag("norm_topk_prob", True),
        scale=hf.number("routed_scaling_factor", 1.0),
        correction=True,
        groups=groups,
        kept_groups=kept,
        group_best=2,
        wide=True,
    )
