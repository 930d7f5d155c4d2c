"""Models that exist by their shapes alone, and how they fit."""

from __future__ import annotations

from functools import cache
from typing import Any

from deploy.capacity.fit import GpuFit, fit
from deploy.capacity.gpus import GPUS
from engine.config import EngineConfig
from engine.models.config import ModelConfig
from tests.engine.worker.test_footprint import LLAMA_70B

LLAMA_8B = LLAMA_70B | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 14336,
}
# As tests/bench/gpu/shapes.py has them.
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
QWEN3_8B = QWEN3_06B | {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = QWEN3_06B | {  # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
MODELS = {
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-8b": QWEN3_8B,
    "llama-8b": LLAMA_8B,
    "llama-70b": LLAMA_70B,
}


@cache
def held(model: str = "llama-8b", gpu: str = "H200", **settings: Any) -> GpuFit:
    """Return how a model of these shapes fits."""
    return fit(EngineConfig("model", **settings), ModelConfig.of(MODELS[model]), GPUS[gpu])
