"""gpt-oss: experts with clamped gates, a learned sink in each head, and a window in every second layer."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from engine.layers.base import Build, Layer, Names, StackedConv1D
from engine.layers.mlp import sigmoid
from engine.layers.moe import Experts, MoE, Routing
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rotary
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLayer, DecoderLM, Stack
from engine.models.gemma import layer_types
from engine.models.llama import LLAMA_NAMES, llama_attention
from engine.models.rope_config import read_rope

EXPERTS = "model.layers.*.mlp.experts"
# What transformers assumes where config.json has no settings of the rotation.
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


class ClampedGate(Layer):
    """SwiGLU whose parts are held within a limit, of gate and up side by side; see OpenAI's model card."""

    def __init__(self, alpha: float, limit: float) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, gate and up in turns] -> [num_tokens, width of each]."""
        gate, up = x[:, ::2].clamp(max=self.limit), x[:, 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * sigmoid(gate * self.alpha)


class GptOss(DecoderLM):
    """GptOssForCausalLM; its experts are plain or in MXFP4."""

    names: ClassVar[Names] = LLAMA_NAMES | {
        "layers.*.attention": "model.layers.*.self_attn",
        "layers.*.mlp.router.linear": "model.layers.*.mlp.router",
        "layers.*.mlp.experts.up.*": StackedConv1D(f"{EXPERTS}.gate_up_proj"),
        "layers.*.mlp.experts.down.*": StackedConv1D(f"{EXPERTS}.down_proj"),
    }

    @staticmethod
    @override
    def stack(config: ModelConfig, build: Build) -> Stack:
        hf, hidden = config.hf, config.hidden_size
        eps, bias, size = hf.number("rms_norm_eps", 1e-5), hf.flag("attention_bias", True), hf.integer("head_dim", 64)
        rotary = Rotary(read_rope(hf, size, build.max_positions, theta=150000.0, default=YARN), size, build)
        window, inner = hf.integer("sliding_window", 128), hf.integer("intermediate_size")
        gate = ClampedGate(hf.number("swiglu_alpha", 1.702), hf.number("swiglu_limit", 7.0))
        count, top_k = hf.integer("num_local_experts", 128), hf.integer("num_experts_per_tok", 4)
        routing = Routing(count, top_k, scores="chosen", bias=True)
        layers = [
            DecoderLayer(
                RMSNorm(hidden, eps, build),
                llama_attention(
                    config,
                    build,
                    size,
                    rotary=rotary,
                    window=window if kind == "sliding_attention" else 0,
                    qkv_bias=bias,
                    output_bias=bias,
                    sinks=True,
                ),
                RMSNorm(hidden, eps, build),
                MoE(
                    hidden,
                    inner,
                    "silu",
                    routing,
                    build,
                    experts=Experts(count, hidden, [2 * inner], inner, gate, build, bias=True),
                ),
            )
            for kind in layer_types(config, every=2)
        ]
        return Stack(layers, RMSNorm(hidden, eps, build), tied=hf.flag("tie_word_embeddings"))
