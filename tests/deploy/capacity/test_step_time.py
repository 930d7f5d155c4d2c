"""Times of steps: by hand, and against what an H100 took."""

from __future__ import annotations

import pytest

from deploy.capacity.fit import fit
from deploy.capacity.gpus import GPUS
from deploy.capacity.links import BRIDGE_OF_A100, NCCL_SECONDS, NETWORK, NVLINK_3, NVLINK_4, NVLINK_5_RACK, PCIE_4
from deploy.capacity.step_time import EAGER_SECONDS, LAUNCH_SECONDS, MEASURED, Chunk, Shares, Steps, _seen
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.config import ModelConfig
from tests.deploy.capacity.shapes import LLAMA_8B, held

# A step's seconds as docs/gpu.md has them, "Decoding at 1,024 tokens of context".
ON_H100 = {
    ("qwen3-0.6b", 1): 1.448e-3,
    ("qwen3-0.6b", 32): 2.902e-3,
    ("qwen3-0.6b", 256): 11.96e-3,
    ("qwen3-8b", 1): 6.588e-3,
    ("qwen3-8b", 32): 8.35e-3,
    ("qwen3-8b", 256): 21.26e-3,
}


@pytest.mark.parametrize(("model", "sequences"), ON_H100)
def test_decodes_in_bf16_are_expected_as_they_were_measured(model, sequences):
    step = Steps(held(model, "H100")).decode(sequences, 1024)
    assert step.expected(MEASURED) == pytest.approx(ON_H100[model, sequences], rel=0.06)
    assert step.seconds < ON_H100[model, sequences]


def test_a_step_of_prompt_tokens_is_expected_as_it_was_measured():
    (step,) = Steps(held("qwen3-8b", "H100")).prefill(8192)
    assert step.expected(MEASURED) == pytest.approx(229.9e-3, rel=0.02)


@pytest.mark.parametrize(
    ("sequences", "rate", "settings"),
    # Tokens a second of the same page, "Decoding ... with one setting changed".
    [
        (1, 88.22, {"enforce_eager": True}),
        (256, 11_978, {"enforce_eager": True}),
        (1, 142.3, {"async_scheduling": False}),
        (256, 11_620, {"async_scheduling": False}),
        (1, 187.6, {"quantization": "fp8"}),
        (256, 13_086, {"quantization": "fp8"}),
        (1, 202.9, {"quantization": "int8"}),
        (256, 5_122, {"quantization": "int8"}),
        (1, 149.7, {"kv_cache_dtype": "fp8"}),
        (256, 13_751, {"kv_cache_dtype": "fp8"}),
        (1, 185.2, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
        (256, 15_985, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    ],
)
def test_other_decodes_are_expected_within_20_percent(sequences, rate, settings):
    step = Steps(held("qwen3-8b", "H100", **settings)).decode(sequences, 1024)
    assert sequences / step.expected(MEASURED) == pytest.approx(rate, rel=0.2)


def test_a_prompt_is_bound_by_products_and_a_lone_token_by_reading_the_weights():
    found = held()
    steps = Steps(found)
    (prompt,) = steps.prefill(1024)
    products = 2 * (found.footprint.layer_products * 1024 + found.footprint.head_products)
    attention = 4 * 32 * 128 * 32 * (1024 * 1025 // 2)
    assert prompt.bound == "compute"
    assert prompt.compute == pytest.approx((products + attention) / 989.5e12)
    token = steps.decode(1, 1000)
    assert token.bound == "memory"
    assert token.memory == pytest.approx((found.footprint.read_bytes + 1001 * 131072) / 4.8e12)
    assert token.launches == pytest.approx(LAUNCH_SECONDS * found.footprint.counts.launches)
    assert token.seconds == pytest.approx(token.memory + token.launches)


def test_fp8_reads_half_and_multiplies_at_the_rate_of_its_units():
    plain, found = held(), held(quantization="fp8")
    assert found.footprint.layer_products == plain.footprint.layer_products
    assert found.num_blocks > plain.num_blocks
    assert 0.5 < found.footprint.read_bytes / plain.footprint.read_bytes < 0.6, "the output head stays in bfloat16"
    (prompt,) = Steps(found).prefill(1024)
    attention = 4 * 32 * 128 * 32 * (1024 * 1025 // 2)
    in_bf16 = 2 * found.footprint.head_products + attention
    in_fp8 = 2 * found.footprint.layer_products * 1024
    assert prompt.compute == pytest.approx(in_bf16 / 989.5e12 + in_fp8 / 1979e12, rel=1e-3)
    with pytest.raises(ConfigError, match="no units for fp8; use int8"):
        held(gpu="A10", quantization="fp8")


def test_int8_is_read_as_it_is_by_few_rows_and_widened_for_many():
    found = held(quantization="int8")
    few, many = (Steps(found).decode(rows, 10) for rows in (64, 65))
    assert few.memory == pytest.approx((found.footprint.read_bytes + 64 * 11 * 131072) / 4.8e12)
    widened = 4 * found.footprint.layer_products  # written in bfloat16, and read again
    assert (many.memory - few.memory) * 4.8e12 == pytest.approx(widened + 11 * 131072)
    assert Steps(held()).decode(65, 10).memory < many.memory, "then plain weights are sooner read"


def test_experts_in_one_launch_are_never_widened():
    """Of a quantised model with experts only attention is made plain for more than a few rows."""
    found = held("qwen3-30b-a3b", quantization="int4")
    outside = found.footprint.layer_products - found.footprint.grouped_products
    few, many = Steps(found).decode(64, 1), Steps(found).decode(65, 1)
    assert 0 < outside < found.footprint.grouped_products / 10
    assert (many.memory - few.memory) * 4.8e12 == pytest.approx(4 * outside, rel=0.01)


# Qwen3-30B-A3B: 48 layers of attention (q and o of 32 heads, k and v of 4, 128 wide), a router and 128 experts, of
# which a token passes through 8.
EXPERT = 3 * 2048 * 768
OUTSIDE = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128)
HEAD = 2048 * 151936


def test_a_token_is_multiplied_by_its_own_experts_alone():
    """A3B is 3.3 billion active parameters, the rows of the embedding included."""
    found = held("qwen3-30b-a3b")
    active = OUTSIDE + 48 * 8 * EXPERT
    assert active + 2 * HEAD == pytest.approx(3.35e9, rel=0.01)
    (prompt,) = Steps(found).prefill(4096)
    attention = 4 * 32 * 128 * 48 * (4096 * 4097 // 2)
    assert prompt.compute == pytest.approx((2 * (active * 4096 + HEAD) + attention) / 989.5e12)


@pytest.mark.parametrize(("rows", "experts"), [(1, 8), (2, 15.5), (64, 128 * (1 - 0.9375**64)), (4096, 128)])
def test_a_step_reads_the_experts_that_its_rows_choose(rows, experts):
    step = Steps(held("qwen3-30b-a3b")).decode(rows, 10)
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    assert step.weights * 4.8e12 == pytest.approx(2 * (OUTSIDE + HEAD + norms + 48 * experts * EXPERT), rel=1e-3)


def test_experts_are_shared_out_among_ranks_whole_or_by_width():
    alone = Steps(held("qwen3-30b-a3b"))
    for apart in (False, True):
        found = held("qwen3-30b-a3b", tensor_parallel_size=4, enable_expert_parallel=apart)
        (layer,) = set(found.footprint.experts)
        assert (layer.own, layer.count, layer.top_k) == (32 if apart else 128, 128, 8)
        assert layer.own * layer.products * 4 == 128 * EXPERT
        for rows in (1, 100):
            quarter, whole = Steps(found).decode(rows, 1), alone.decode(rows, 1)
            assert quarter.compute == pytest.approx(whole.compute / 4, rel=0.02)
            assert quarter.weights == pytest.approx(whole.weights / 4, rel=0.02)


def test_rows_of_experts_are_multiplied_in_the_dtype_whatever_the_weights_are_held_in():
    plain, fp8 = (Steps(held("qwen3-30b-a3b", quantization=each)).prefill(4096)[0] for each in (None, "fp8"))
    saved = 2 * (OUTSIDE - 48 * 2048 * 128) * 4096 * (1 / 989.5e12 - 1 / 1979e12)
    assert plain.compute - fp8.compute == pytest.approx(saved, rel=0.06)


def test_a_large_batch_of_decodes_is_bound_by_products():
    found = held()
    step = Steps(found).decode(4096, 10)
    products = 2 * (found.footprint.layer_products + found.footprint.head_products) * 4096
    assert step.compute == pytest.approx((products + 4 * 32 * 128 * 32 * 10 * 4096) / 989.5e12)
    assert step.compute > step.memory


def test_a_long_prompt_goes_in_steps_and_a_cached_one_in_fewer():
    steps = Steps(held())
    assert len(steps.prefill(20_000)) == 3
    assert len(steps.prefill(20_000, cached=16_000)) == 1
    alone = sum(step.compute for step in Steps(held(max_num_batched_tokens=65_536)).prefill(20_000))
    # The same products and attention, but for the logits of two steps more.
    assert sum(step.compute for step in steps.prefill(20_000)) == pytest.approx(alone, rel=1e-4)


def test_a_chunk_beside_decodes_reads_the_weights_once():
    steps = Steps(held())
    both, decode, prompt = (
        steps.step(8, 500, [Chunk(0, 300)]),
        steps.decode(8, 500),
        steps.step(0, 0, [Chunk(0, 300)]),
    )
    assert both.compute == pytest.approx(decode.compute + prompt.compute)
    assert both.cache == pytest.approx(decode.cache + prompt.cache)
    assert both.weights == decode.weights == prompt.weights


def test_a_sliding_window_is_read_and_multiplied_no_further():
    windowed = LLAMA_8B | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    found = fit(EngineConfig("model"), ModelConfig.of(windowed), GPUS["H200"])
    near, far = (Steps(found).decode(8, context) for context in (4096, 100_000))
    assert near == far
    assert Steps(held()).decode(8, 100_000).memory > far.memory


def test_the_keys_that_queries_see_are_counted_as_one_by_one():
    for first, count, window in ((0, 7, 100), (3, 9, 5), (20, 4, 5), (0, 1, 1), (4, 1, 5)):
        assert _seen(first, count, window) == sum(min(p + 1, window) for p in range(first, first + count))


def test_a_share_of_the_roofline_holds_for_all_of_it():
    step = Steps(held("qwen3-8b", "H100", kv_cache_dtype="fp8", async_scheduling=False)).decode(64, 1024)
    asked = step.expected(Shares(0.5, 0.5, 0.5, 0.5))
    assert asked == pytest.approx(max(step.compute, step.memory) / 0.5 + step.launches + step.host)


def test_the_host_hides_behind_the_device_where_steps_overlap_and_launches_without_graphs():
    overlapped, apart = (Steps(held(async_scheduling=each)).decode(1, 100) for each in (True, False))
    assert overlapped.host == apart.host < overlapped.memory
    assert apart.seconds == pytest.approx(overlapped.seconds + apart.host)
    found = held(enforce_eager=True)
    eager = Steps(found).decode(1, 100)
    assert eager.host == pytest.approx(apart.host + EAGER_SECONDS * found.footprint.counts.launches)
    assert (eager.bound, eager.seconds) == ("host", eager.host)
    # A prompt that is larger than any graph is launched kernel by kernel, too.
    (large,), (small,) = Steps(held()).prefill(2048), Steps(held()).prefill(512)
    assert large.host > 5 * small.host


# Between ranks.


def test_ranks_sum_after_attention_and_feed_forward_and_for_embeddings():
    alone, two = held("llama-70b", "B200"), held("llama-70b", "B200", tensor_parallel_size=2)
    assert alone.footprint.counts.exchanges == 0
    counts = two.footprint.counts
    assert counts.exchanges == 2 * 80 + 1
    assert counts.token_bytes == counts.exchanges * 8192 * 2
    assert two.footprint.counts.launches - alone.footprint.counts.launches < 20
    step = Steps(two).decode(8, 100)
    each = two.gpu.link.sum_seconds(8 * 8192 * 2, 2, 1 << 20)
    assert step.exchanges == pytest.approx(counts.exchanges * each)
    assert step.launches == pytest.approx(LAUNCH_SECONDS * (counts.launches + counts.exchanges))


def test_a_sum_takes_what_its_link_allows():
    size = 64 << 20
    assert NVLINK_4.sum_seconds(size, 1) == 0
    # A ring sends 2 (n - 1) / n of it, an NVSwitch that adds sends it once.
    assert NVLINK_3.sum_seconds(size, 8) == pytest.approx(NCCL_SECONDS + 14 * 0.47e-6 + 1.75 * size / 300e9)
    assert NVLINK_4.sum_seconds(size, 8) == pytest.approx(NCCL_SECONDS + 2 * 0.47e-6 + size / 450e9)
    assert PCIE_4.sum_seconds(size, 2) == pytest.approx(NCCL_SECONDS + 2 * 1e-6 + size / 32e9)
    # Small ones go in one shot: every rank reads those of all others.
    small = 16 << 10
    assert NVLINK_4.sum_seconds(small, 4, at_once=1 << 19) == pytest.approx(2 * 0.47e-6 + 3 * small / 450e9)
    assert PCIE_4.sum_seconds(small, 4, at_once=1 << 19) == PCIE_4.sum_seconds(small, 4)


def test_a_group_that_is_larger_than_its_link_is_as_slow_as_what_joins_it():
    assert NVLINK_4.for_ranks(8) is NVLINK_4
    assert NVLINK_4.for_ranks(16).name == NETWORK.name
    assert BRIDGE_OF_A100.for_ranks(2) is BRIDGE_OF_A100
    assert BRIDGE_OF_A100.for_ranks(4) is PCIE_4
    assert BRIDGE_OF_A100.for_ranks(16).name == NETWORK.name


def test_a_ring_over_nodes_leaves_each_by_all_ports_and_has_few_hops_of_the_network():
    size = 64 << 20
    latency = NCCL_SECONDS + 2 * 2.7e-6 + 28 * 1e-6
    assert NVLINK_4.for_ranks(16).sum_seconds(size, 16) == pytest.approx(latency + 1.875 * size / 400e9)
    # PCIe is slower than the ports of a node.
    assert PCIE_4.for_ranks(16).sum_seconds(size, 16) == pytest.approx(latency + 1.875 * size / 32e9)
    alone = NCCL_SECONDS + 2 * 2.7e-6 + size / 50e9  # nodes of one GPU
    assert NETWORK.for_ranks(2).sum_seconds(size, 2) == pytest.approx(alone)


def test_nodes_of_fewer_gpus_are_left_sooner():
    four = NVLINK_4.within_nodes(4)
    assert four.for_ranks(4).name == "NVLink 4"
    assert four.for_ranks(8).name == NETWORK.name
    assert BRIDGE_OF_A100.within_nodes(4).for_ranks(4).name == "PCIe 4.0"
    assert BRIDGE_OF_A100.within_nodes(4).for_ranks(8).name == NETWORK.name
    assert BRIDGE_OF_A100.within_nodes(1).for_ranks(2).name == NETWORK.name
    assert NVLINK_5_RACK.within_nodes(4).for_ranks(8).name == "NVLink 5", "a rack's NVLink joins its nodes"
    assert NETWORK.within_nodes(1) is NETWORK
