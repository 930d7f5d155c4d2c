"""What a step launches and sends, of models that nobody has loaded."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.models.blueprint import META
from engine.models.config import ModelConfig
from engine.resolve import resolve_for
from engine.worker import footprint
from engine.worker.footprint import footprint_of
from engine.worker.step_counts import Launches
from tests.engine.worker.test_footprint import LLAMA_70B

LLAMA = LLAMA_70B | {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 1024,
}
MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "head_dim": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
WINDOWED = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 32,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 4, "full_attention"],
    "rms_norm_eps": 1e-6,
}
# Of a layer: two norms, four products, the gate; rotation with the store, attention over pieces of the keys, and over
# the pieces.
LAYER = 2 + 4 + 1 + 3


def counts(values, **settings):
    model = ModelConfig.of(values)
    return footprint_of(resolve_for(EngineConfig("model", **settings), model, "cuda"), model).counts


def test_a_layer_launches_ten_kernels():
    four, five = counts(LLAMA), counts(LLAMA | {"num_hidden_layers": 5})
    assert five.launches - four.launches == LAYER
    assert four.launches - 4 * LAYER < 10
    assert (four.exchanges, four.token_bytes) == (0, 0)


def test_weights_in_eight_or_four_bits_are_one_product_as_well_and_activations_in_fp8_are_made_first():
    plain = counts(LLAMA).launches
    assert counts(LLAMA, quantization="int8").launches == counts(LLAMA, quantization="int4").launches == plain
    assert counts(LLAMA, quantization="fp8").launches == plain + 4 * 4


def test_experts_read_weights_in_fp8_as_they_are():
    """So that no more launches than those of attention's two products make activations fp8."""
    assert counts(MOE, quantization="fp8").launches == counts(MOE).launches + 2 * 4


@pytest.mark.parametrize("values", [LLAMA, MOE, WINDOWED], ids=["dense", "experts", "windows"])
def test_layers_that_are_run_count_for_all_that_are_like_them(monkeypatch, values):
    settings = {"tensor_parallel_size": 2, "quantization": "fp8"}
    of_some = counts(values | {"num_hidden_layers": 7}, **settings)
    monkeypatch.setattr(footprint, "LAYERS_RUN", 7)
    assert counts(values | {"num_hidden_layers": 7}, **settings) == of_some


def test_layers_of_transformers_launch_what_ours_do_where_they_are_recognised():
    by_transformers = counts(LLAMA | {"model_type": "llama"}, model_impl="transformers")
    assert by_transformers.launches == pytest.approx(counts(LLAMA).launches, rel=0.1)


def test_ranks_sum_twice_in_a_layer_and_once_for_embeddings():
    found = counts(LLAMA, tensor_parallel_size=2)
    assert found.exchanges == 2 * 4 + 1
    assert found.token_bytes == found.exchanges * 256 * 2


def test_experts_multiply_in_two_launches_however_many_there_are():
    few, many = counts(MOE), counts(MOE | {"num_experts": 32})
    assert few == many
    assert few.launches > counts(LLAMA).launches, "routing takes some"


def test_expert_parallelism_exchanges_rows_twice_in_a_layer():
    summed, exchanged = (counts(MOE, tensor_parallel_size=2, enable_expert_parallel=each) for each in (False, True))
    assert exchanged.exchanges - summed.exchanges == 2 * 4
    assert exchanged.token_bytes > summed.token_bytes


def test_views_and_empty_tensors_launch_nothing():
    with META, Launches() as seen:
        x = torch.empty(4, 8)
        x.view(8, 4).t()[1:].unsqueeze(0).expand(2, -1, -1)
        assert seen.count == 0
        x + 1
        x.mul_(2)
        assert seen.count == 2
        with seen.as_kernels(1):
            x + 1
            x + 2
        assert seen.count == 3
