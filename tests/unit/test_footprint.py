"""Sizes of a model that nobody has loaded."""

from __future__ import annotations

import torch

from engine import footprint
from engine.config import EngineConfig
from engine.footprint import SAMPLER_BYTES, build_blueprint, footprint_of, graph_bytes, step_bytes
from engine.live_bytes import LiveBytes
from engine.models.registry import architecture_of
from engine.resolve import resolve_for
from engine.sampler import sample
from engine.step_tensors import dummy_sampling

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}


def resolved(values, **settings):
    spec = architecture_of(values)[1]
    return resolve_for(EngineConfig("model", **settings), spec, "cuda"), spec


def test_a_model_of_70_billion_parameters_is_measured_without_its_memory():
    alone = footprint_of(*resolved(LLAMA_70B))
    assert alone.parameters == 70_553_706_496  # as Meta's model card counts them: 70.6 billion
    assert alone.weight_bytes == 2 * alone.parameters + 131072 * 128 * 4  # and the angles of all positions
    assert alone.block_bytes == 16 * 80 * 2 * 8 * 128 * 2
    shared = footprint_of(*resolved(LLAMA_70B, tensor_parallel_size=4))
    assert 4 * shared.layer_products == alone.layer_products
    assert 4 * shared.block_bytes == alone.block_bytes
    assert (shared.num_heads, shared.num_kv_heads) == (16, 2)


def test_more_ranks_than_kv_heads_hold_one_each():
    assert footprint_of(*resolved(LLAMA_70B, tensor_parallel_size=16)).num_kv_heads == 1


def test_what_no_attention_of_gpus_takes_is_told():
    assert "set block_size to 16" in footprint_of(*resolved(LLAMA_70B, block_size=8)).no_attention
    for size in (16, 256):
        assert footprint_of(*resolved(LLAMA_70B, block_size=size)).no_attention is None


def test_blocks_of_an_fp8_cache_are_half_as_large():
    whole, half = (footprint_of(*resolved(LLAMA_70B, kv_cache_dtype=each)).block_bytes for each in ("auto", "fp8"))
    assert whole == 2 * half


def test_a_step_takes_more_with_more_tokens_and_with_more_sequences():
    small = resolved(LLAMA_70B, max_num_batched_tokens=2048, max_num_seqs=8)
    many_tokens = resolved(LLAMA_70B, max_num_batched_tokens=8192, max_num_seqs=8)
    many_rows = resolved(LLAMA_70B, max_num_batched_tokens=2048, max_num_seqs=1024)
    least = step_bytes(*small)
    assert 3.9 < step_bytes(*many_tokens) / least < 4.1
    assert step_bytes(*many_rows) > 1024 * 128256 * SAMPLER_BYTES > least


def test_a_step_in_fp8_holds_its_rows_beside_what_a_plain_one_does():
    plain = step_bytes(*resolved(LLAMA_70B, max_num_seqs=8))
    in_fp8 = step_bytes(*resolved(LLAMA_70B, max_num_seqs=8, quantization="fp8"))
    widest = 8192 * (28672 + 4)  # tokens, and a row in e4m3 with its scale: what the last product of a layer takes
    assert plain < in_fp8 <= plain + widest


def test_two_layers_take_what_all_of_them_take(monkeypatch):
    config, spec = resolved(LLAMA_70B | {"num_hidden_layers": 7}, max_num_seqs=8)
    of_two = step_bytes(config, spec)
    monkeypatch.setattr(footprint, "LAYERS_RUN", 7)
    assert step_bytes(config, spec) == of_two


def test_graphs_take_their_logits_and_what_one_step_of_the_largest_computes_in():
    for sizes, rows in ((None, 256), ((8, 64), 64)):
        found = graph_bytes(*resolved(LLAMA_70B, cudagraph_capture_sizes=sizes))
        logits = rows * 128256 * (4 + 2)  # in fp32 to draw from, in bf16 as they are multiplied
        assert logits <= found <= 1.1 * logits, "layers hold less than that"
    alone, shared = (graph_bytes(*resolved(LLAMA_70B, tensor_parallel_size=ranks)) for ranks in (1, 4))
    assert 0.25 <= shared / alone < 0.35
    assert footprint_of(*resolved(LLAMA_70B, enforce_eager=True)).graph_bytes == 0
    assert footprint_of(*resolved(LLAMA_70B, block_size=8)).graph_bytes == 0, "there is no attention that has graphs"


def test_the_sampler_takes_what_a_step_is_counted_with():
    for rows, vocab in ((64, 32_000), (8, 128_256)):
        logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode(), LiveBytes() as seen:
            sample(logits, dummy_sampling(rows))
        assert 0.8 * SAMPLER_BYTES < seen.peak / (rows * vocab) <= SAMPLER_BYTES


def test_live_bytes_are_those_of_storages_and_end_with_them():
    x = torch.zeros(1000)
    with LiveBytes() as seen:
        y = x + 1  # 4,000 bytes
        y.add_(1)
        view = y[:10]
        del y
        z = view + 1  # 40 bytes more
        del view
        x * 2  # 4,000 bytes, after the first were freed
    assert z.numel() == 10
    assert seen.peak == 4040


def test_a_blueprint_has_no_memory():
    decoder = build_blueprint(*resolved(LLAMA_70B))
    assert {weight.device.type for weight in decoder.parameters()} == {"meta"}
