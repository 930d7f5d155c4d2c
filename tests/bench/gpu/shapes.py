"""Shapes of real models, as their public `config.json` files give them, and small ones that stand in for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """One decoder. family: "qwen3" (norms of queries and keys) or "llama". tied: the head is the embedding."""

    name: str
    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    rope_theta: float
    positions: int
    norm_eps: float
    rope: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of all layers; norms are left out."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Elements of the output head."""
        return self.vocab * self.hidden

    @property
    def stored_weights(self) -> int:
        """Elements of all matrices in the checkpoint."""
        return self.layer_weights + self.head_weights * (1 if self.tied else 2)

    @property
    def kv_per_token(self) -> int:
        """Elements of keys and values of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def config(self) -> dict[str, Any]:
        """Return the `config.json`."""
        qwen = self.family == "qwen3"
        return {
            "architectures": ["Qwen3ForCausalLM" if qwen else "LlamaForCausalLM"],
            "model_type": self.family,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "rope_theta": self.rope_theta,
            "rope_scaling": dict(self.rope) or None,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


QWEN3_06B = Shape(
    name="qwen3-0.6b",
    family="qwen3",
    hidden=1024,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate=3072,
    vocab=151_936,
    tied=True,
    rope_theta=1e6,
    positions=40_960,
    norm_eps=1e-6,
)
LLAMA_1B = Shape(
    name="llama-3.2-1b",
    family="llama",
    hidden=2048,
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    intermediate=8192,
    vocab=128_256,
    tied=True,
    rope_theta=5e5,
    positions=131_072,
    norm_eps=1e-5,
    rope=LLAMA3_ROPE,
)
QWEN3_8B = replace(QWEN3_06B, name="qwen3-8b", hidden=4096, layers=36, heads=32, intermediate=12_288, tied=False)
REAL = (QWEN3_06B, LLAMA_1B, QWEN3_8B)


def tiny(shape: Shape) -> Shape:
    """Return a shape of the same kind that a CPU runs in milliseconds."""
    return replace(
        shape, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=10_240, positions=4096
    )
