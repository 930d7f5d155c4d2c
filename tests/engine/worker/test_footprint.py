"""Sizes of a model that nobody has loaded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.inputs.dummy_steps import dummy_step, fullest_sampling
from engine.models.config import ModelConfig
from engine.resolve import resolve_for
from engine.sampling.device_rules import DeviceRules, TokenLogs
from engine.worker import footprint
from engine.worker.footprint import SAMPLER_BYTES, AttentionWork, LiveBytes, build_blueprint, footprint_of
from engine.worker.forward import LOGIT_ROWS, SCORED_BYTES, logit_rows
from engine.worker.step_outputs import outputs_of

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

IDS = 16 * 4  # bytes of the tokens of a block
SMALL = LLAMA_70B | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def resolved(values, **settings):
    model = ModelConfig.of(values)
    return resolve_for(EngineConfig("model", **settings), model, "cuda"), model


def step_bytes(*asked):
    return footprint_of(*asked).step_bytes


def graph_bytes(*asked):
    return footprint_of(*asked).graph_bytes


def test_a_model_of_70_billion_parameters_is_measured_without_its_memory():
    alone = footprint_of(*resolved(LLAMA_70B))
    assert alone.parameters == 70_553_706_496  # as Meta's model card counts them: 70.6 billion
    assert alone.weight_bytes == 2 * alone.parameters + 131072 * 128 * 4  # and the angles of all positions
    assert alone.block_bytes == 16 * 80 * 2 * 8 * 128 * 2 + IDS
    shared = footprint_of(*resolved(LLAMA_70B, tensor_parallel_size=4))
    assert 4 * shared.layer_products == alone.layer_products
    assert 4 * (shared.block_bytes - IDS) == alone.block_bytes - IDS
    assert set(shared.attention) == {AttentionWork(0, 4 * 16 * 128, 2 * 2 * 128 * 2)}


def test_more_ranks_than_kv_heads_hold_one_each():
    held = footprint_of(*resolved(LLAMA_70B, tensor_parallel_size=16)).attention
    assert {layer.token_bytes for layer in held} == {2 * 1 * 128 * 2}


def test_what_no_attention_of_gpus_takes_is_told():
    assert "set block_size to 16" in footprint_of(*resolved(LLAMA_70B, block_size=8)).no_attention
    for size in (16, 256):
        assert footprint_of(*resolved(LLAMA_70B, block_size=size)).no_attention is None


def test_blocks_of_an_fp8_cache_are_half_as_large():
    whole, half = (footprint_of(*resolved(LLAMA_70B, kv_cache_dtype=each)).block_bytes for each in ("auto", "fp8"))
    assert whole - IDS == 2 * (half - IDS)


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
    assert plain <= in_fp8 <= plain + widest


def test_two_layers_take_what_all_of_them_take(monkeypatch):
    config, model = resolved(LLAMA_70B | {"num_hidden_layers": 7}, max_num_seqs=8)
    of_two = step_bytes(config, model)
    monkeypatch.setattr(footprint, "LAYERS_RUN", 7)
    assert step_bytes(config, model) == of_two


def test_graphs_take_their_logits_and_what_one_step_of_the_largest_computes_in():
    for sizes, rows in (((256,), 256), ((8, 64), 64)):
        found = graph_bytes(*resolved(LLAMA_70B, cudagraph_capture_sizes=sizes))
        logits = rows * 128256 * (2 + 2)  # in bf16, as they are multiplied and as they are kept to draw from
        assert logits <= found <= 1.1 * logits, "layers hold less than that"
    alone, shared = (graph_bytes(*resolved(LLAMA_70B, tensor_parallel_size=ranks)) for ranks in (1, 4))
    assert 0.25 <= shared / alone < 0.45
    wider = 512 * 2 * (2 * 28672 + 28672 + 2 * 8192)  # steps with prompts have up to 512 tokens
    assert 256 * 128256 * 2 + wider <= alone <= 1.3 * (256 * 128256 * 2 + wider)
    assert footprint_of(*resolved(LLAMA_70B, enforce_eager=True)).graph_bytes == 0
    assert footprint_of(*resolved(LLAMA_70B, block_size=8)).graph_bytes == 0, "there is no attention that has graphs"


def pieces(rows, vocab, most):
    """Make logits as a step does: a piece at a time, kept by nobody else."""
    for start in range(0, rows, most):
        yield torch.randn(min(most, rows - start), vocab)


def rules_of(rows):
    """Return rows that live in the null block."""
    tables = torch.zeros(rows, 32, dtype=torch.int32)
    return DeviceRules(TokenLogs(torch.zeros(1, 16, dtype=torch.int32), tables, np.arange(rows, dtype=np.int32)))


@pytest.mark.parametrize(("rows", "vocab"), [(64, 32_000), (8, 128_256)])
def test_the_sampler_takes_what_a_step_is_counted_with(rows, vocab):
    sampling = fullest_sampling(dummy_step(rows, rows, 512, 16), 1, vocab)
    sampling.prompt = None
    with torch.inference_mode(), LiveBytes() as seen:
        outputs_of(pieces(rows, vocab, rows), sampling, rules=rules_of(rows))
    assert 0.8 * SAMPLER_BYTES < seen.peak / (rows * vocab) <= 4 + SAMPLER_BYTES


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_the_scores_of_a_prompt_take_what_a_step_is_counted_with(rows):
    vocab, tokens = 32_000, 256
    config, model = resolved(SMALL | {"vocab_size": vocab}, max_num_seqs=rows, max_num_batched_tokens=tokens)
    most = min(logit_rows(config, vocab), tokens)
    step = dummy_step(tokens, rows, 512, 16)
    sampling = fullest_sampling(step, most, vocab)
    with torch.inference_mode(), LiveBytes() as seen:
        outputs = outputs_of(pieces(len(step.logits_indices), vocab, most), sampling, rules=rules_of(rows))
    assert len(outputs.prompt_logprobs.chosen) == most == tokens
    assert len(outputs.token_ids) == rows
    assert seen.peak <= step_bytes(config, model) < 4 * seen.peak


def test_a_large_vocabulary_has_few_logits_of_a_prompt_in_memory_at_a_time():
    vocab = 152_064
    for rows in (1, 16, 256):
        config, model = resolved(LLAMA_70B | {"vocab_size": vocab}, max_num_seqs=rows)
        most = logit_rows(config, vocab)
        assert most == max(rows, SCORED_BYTES // (4 * vocab)) < 300
        kept, piece, read = (rows * vocab * 4, most * vocab * 4, most * vocab * 6)
        assert step_bytes(config, model) >= kept + piece + read
    assert logit_rows(resolved(LLAMA_70B, max_num_seqs=4096)[0], vocab) == LOGIT_ROWS


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
