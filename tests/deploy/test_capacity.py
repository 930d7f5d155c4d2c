"""`squadron plan`: what fits, what does not, and what comes nearest."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from deploy.capacity.fit import CONTEXT_BYTES, NCCL_BYTES, fit
from deploy.capacity.gpus import GPUS, gpu_named
from deploy.capacity.load import ExpectedLoad, Roofline, SteadyReplica, Wanted, serve_load
from deploy.capacity.plan import plan_capacity
from deploy.cli.terminal import GIB
from deploy.main import explain
from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.models.config import ModelConfig
from engine.resolve import resolve_for
from tests.engine.worker.test_footprint import LLAMA_70B

LLAMA_8B = LLAMA_70B | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 14336,
}


def held(values=LLAMA_8B, gpu="H200", **settings):
    return fit(EngineConfig("model", block_size=256, **settings), ModelConfig.of(values), GPUS[gpu])


@pytest.fixture
def folder(tmp_path):
    def make(values):
        (tmp_path / "config.json").write_text(json.dumps(values))
        return str(tmp_path)

    return make


def refusal(model, gpu, load=None, **settings):
    with pytest.raises(ConfigError) as error:
        plan_capacity(EngineConfig(model, **settings), gpu, load or Wanted())
    return explain(error.value), error.value.flag


@pytest.mark.parametrize(("ranks", "other"), [(1, CONTEXT_BYTES), (2, CONTEXT_BYTES + NCCL_BYTES)])
def test_the_parts_of_a_gpu_come_to_what_may_be_used(ranks, other):
    found = held(tensor_parallel_size=ranks)
    sizes = found.footprint
    parts = sizes.weight_bytes + sizes.step_bytes + sizes.graph_bytes + found.other_bytes + found.kv_bytes
    assert 0 <= found.allowed_bytes - parts < found.footprint.block_bytes
    assert found.other_bytes == other
    assert found.kv_tokens == (found.num_blocks - 1) * 256
    assert found.config.num_kv_blocks == found.num_blocks


@pytest.mark.parametrize(
    ("name", "seen"),
    # As torch gives them (`total capacity`), GiB, from reports of memory that ran out.
    [
        ("L40S", 44.53),
        ("L40", 44.40),
        ("RTX-4090", 23.68),
        ("RTX-6000-Ada", 44.43),
        ("RTX-A6000", 47.54),
        ("A30", 23.53),
        ("B200", 178.35),
    ],
)
def test_what_cuda_reports_is_near_what_was_seen(name, seen):
    assert GPUS[name].total_bytes / GIB == pytest.approx(seen, rel=0.01)


def test_the_table_is_sound():
    for name, gpu in GPUS.items():
        assert gpu.name == name
        assert gpu.fp32 < gpu.bf16 < (gpu.fp8 or float("inf")), name
        assert gpu.fp8 is None or gpu.fp8 / gpu.bf16 == pytest.approx(2, rel=0.03), name


def test_gpus_are_found_by_any_usual_name():
    assert gpu_named("nvidia h200") is gpu_named("H200-SXM") is GPUS["H200"]
    assert gpu_named("a100").memory == 80
    # Labels of nodes, and names as `nvidia-smi` shows them.
    assert gpu_named("NVIDIA-H100-80GB-HBM3") is gpu_named("NVIDIA H100 80GB HBM3") is GPUS["H100"]
    assert gpu_named("NVIDIA A100-SXM4-80GB") is GPUS["A100-80GB"]
    assert gpu_named("NVIDIA H100 NVL") is GPUS["H100-NVL"]
    assert gpu_named("NVIDIA GeForce RTX 4090") is GPUS["RTX-4090"]
    assert gpu_named("NVIDIA RTX 6000 Ada Generation") is GPUS["RTX-6000-Ada"]
    with pytest.raises(ConfigError, match="did you mean L40S"):
        gpu_named("L40SS")
    with pytest.raises(ConfigError, match=r"known: .*H200, "):
        gpu_named("tpu")


def test_weights_that_do_not_fit_name_ranks_and_gpu_that_do(folder):
    model = folder(LLAMA_70B)
    text, flag = refusal(model, "H200")
    assert flag == "tensor_parallel_size"
    assert "the weights take 131.5 GiB" in text
    assert text.endswith("Any of these does: --tensor-parallel-size 2, --gpu B200")
    plan_capacity(EngineConfig(model, tensor_parallel_size=2), "H200", Wanted())
    plan_capacity(EngineConfig(model), "B200", Wanted())


def test_a_context_that_does_not_fit_names_the_longest_that_does(folder):
    model = folder(LLAMA_8B)
    text, _ = refusal(model, "L4", max_model_len=131072)
    assert "--tensor-parallel-size 2" in text
    longest = int(text.split("--max-model-len ")[-1].split(",")[0])
    found = plan_capacity(EngineConfig(model, max_model_len=longest), "L4", Wanted())
    assert found.fit.kv_tokens >= longest
    refusal(model, "L4", max_model_len=longest + 16)


def test_a_context_that_nobody_asked_for_is_lowered_and_told(folder):
    found = plan_capacity(EngineConfig(folder(LLAMA_8B)), "L4", Wanted())
    assert found.fit.config.context_len == found.fit.kv_tokens < 131072
    assert any("lowered from the model's 131,072" in line for line in found.lines())
    assert found.public()["max_model_len_lowered"] is True


def test_float32_names_bfloat16(folder):
    assert "--dtype bfloat16" in refusal(folder(LLAMA_8B), "L4", dtype="float32")[0]


def test_a_step_that_is_too_large_names_a_smaller_one(folder):
    text, _ = refusal(folder(LLAMA_8B), "L4", max_num_batched_tokens=1 << 17)
    assert "--max-num-batched-tokens 32768" in text


def test_ranks_that_the_heads_do_not_divide_by_name_those_that_they_do(folder):
    text, flag = refusal(folder(LLAMA_8B), "H200", tensor_parallel_size=3)
    assert flag == "tensor_parallel_size"
    assert "This does: --tensor-parallel-size 4" in text


def test_more_blocks_than_fit_are_refused_with_how_many_do(folder):
    model = folder(LLAMA_8B)
    text, flag = refusal(model, "L4", num_kv_blocks=10_000)
    assert flag == "num_kv_blocks"
    most = int(text.split("use at most ")[1].split(".")[0])
    assert plan_capacity(EngineConfig(model, num_kv_blocks=most), "L4", Wanted()).fit.num_blocks == most


def test_a_context_beyond_the_model_is_refused_as_the_engine_does(folder):
    text, flag = refusal(folder(LLAMA_8B), "H200", max_model_len=200_000)
    assert flag == "max_model_len"
    assert "beyond the model's 131072 positions" in text
    assert "--max-model-len 131072" in text


def test_a_folder_without_a_config_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        plan_capacity(EngineConfig(str(tmp_path)), "H200", Wanted(1, 1))


def test_a_prompt_is_bound_by_products_and_a_lone_token_by_reading_the_weights():
    found = held()
    roofline = Roofline(found)
    (prompt,) = roofline.prefill(1024)
    products = 2 * (found.footprint.layer_products * 1024 + found.footprint.head_products)
    attention = 4 * 32 * 128 * 32 * (1024 * 1025 // 2)
    assert prompt.bound == "compute"
    assert prompt.seconds == pytest.approx((products + attention) / 989.5e12)
    token = roofline.decode(1, 1000)
    assert token.bound == "memory"
    assert token.seconds == pytest.approx((found.footprint.read_bytes + 1001 * 131072) / 4.8e12)


def test_fp8_reads_half_and_multiplies_at_the_rate_of_its_units():
    plain, found = held(), held(quantization="fp8")
    assert found.footprint.layer_products == plain.footprint.layer_products
    assert found.num_blocks > plain.num_blocks
    assert 0.5 < found.footprint.read_bytes / plain.footprint.read_bytes < 0.6, "the output head stays in bfloat16"
    (prompt,) = Roofline(found).prefill(1024)
    attention = 4 * 32 * 128 * 32 * (1024 * 1025 // 2)
    in_bf16 = 2 * found.footprint.head_products + attention
    in_fp8 = 2 * found.footprint.layer_products * 1024
    assert prompt.seconds == pytest.approx(in_bf16 / 989.5e12 + in_fp8 / 1979e12, rel=1e-3)
    with pytest.raises(ConfigError, match="no units for fp8; use int8"):
        held(gpu="A10", quantization="fp8")


def test_int8_is_read_as_it_is_by_few_rows_and_widened_for_many():
    found = held(quantization="int8")
    few, many = (Roofline(found).decode(rows, 10) for rows in (64, 65))
    assert few.memory == pytest.approx((found.footprint.read_bytes + 64 * 11 * 131072) / 4.8e12)
    widened = 4 * found.footprint.layer_products  # written in bfloat16, and read again
    assert (many.memory - few.memory) * 4.8e12 == pytest.approx(widened + 11 * 131072)
    assert Roofline(held()).decode(65, 10).memory < many.memory, "then plain weights are sooner read"


def test_a_large_batch_of_decodes_is_bound_by_products():
    found = held()
    step = Roofline(found).decode(4096, 10)
    products = 2 * (found.footprint.layer_products + found.footprint.head_products) * 4096
    assert step.bound == "compute"
    assert step.seconds == pytest.approx((products + 4 * 32 * 128 * 32 * 10 * 4096) / 989.5e12)


def test_a_long_prompt_goes_in_steps_and_a_cached_one_in_fewer():
    roofline = Roofline(held())
    assert len(roofline.prefill(20_000)) == 3
    assert len(roofline.prefill(20_000, cached=16_000)) == 1
    alone = sum(step.compute for step in Roofline(held(max_num_batched_tokens=65_536)).prefill(20_000))
    # The same products and attention, but for the logits of two steps more.
    assert sum(step.compute for step in roofline.prefill(20_000)) == pytest.approx(alone, rel=1e-4)


def test_a_sliding_window_is_read_and_multiplied_no_further():
    windowed = LLAMA_8B | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    near, far = (Roofline(held(windowed)).decode(8, context) for context in (4096, 100_000))
    assert near == far
    assert Roofline(held()).decode(8, 100_000).memory > far.memory


def test_the_keys_that_queries_see_are_counted_as_one_by_one():
    from deploy.capacity.load import _seen

    for first, count, window in ((0, 7, 100), (3, 9, 5), (20, 4, 5), (0, 1, 1), (4, 1, 5)):
        assert _seen(first, count, window) == sum(min(p + 1, window) for p in range(first, first + count))


def test_a_replica_does_what_its_sequences_get_done():
    found, load = held(), ExpectedLoad(1024, 256, rps=100.0)
    done = serve_load(found, load)
    assert done.limit == "--max-num-seqs"
    assert done.rps == pytest.approx(256 / (256 * done.tpot))
    assert (done.replicas - 1) * done.rps < 100 <= done.replicas * done.rps


def test_a_token_takes_a_step_and_its_part_of_the_prompts_that_come_meanwhile():
    found = held()
    roofline, replica = Roofline(found), SteadyReplica(found, ExpectedLoad(1024, 256, share=0.5))
    prompt, step = roofline.prefill_seconds(1024), roofline.decode(8, 1024 + 128).seconds
    assert replica.tpot(8) == pytest.approx((step + 8 / 256 * prompt) / 0.5)
    assert replica.ttft(8) == pytest.approx((step + prompt) / 0.5)


def test_targets_lower_the_sequences_until_they_are_met():
    found = held()
    free = serve_load(found, ExpectedLoad(1024, 256))
    bound = serve_load(found, ExpectedLoad(1024, 256, tpot=free.tpot / 2))
    assert bound.limit == "--tpot"
    replica = SteadyReplica(found, ExpectedLoad(1024, 256))
    assert replica.tpot(bound.sequences) <= free.tpot / 2 < replica.tpot(bound.sequences + 1)


def test_a_small_cache_bounds_the_sequences():
    done = serve_load(held(num_kv_blocks=1001, max_model_len=4096), ExpectedLoad(2000, 500))
    assert (done.sequences, done.limit) == (100, "KV cache")


def test_a_target_that_no_request_meets_names_what_does(folder):
    model = folder(LLAMA_70B)
    text, flag = refusal(model, "H200", Wanted(1024, 256, ttft=0.1), tensor_parallel_size=2)
    assert flag == "ttft"
    assert "--ttft=0.1 s cannot be met" in text
    assert "--tensor-parallel-size 4" in text
    plan_capacity(EngineConfig(model, tensor_parallel_size=4), "H200", Wanted(1024, 256, ttft=0.1))


def test_a_target_that_nothing_meets_says_so(folder):
    model, load = folder(LLAMA_70B), Wanted(1024, 256, ttft=1e-6)
    text, _ = refusal(model, "L4", load, tensor_parallel_size=16)
    assert text.endswith("for one request alone, at 50% of the roofline")
    text, _ = refusal(model, "L4", load, tensor_parallel_size=4)
    assert "No single change bears the load; the model fits with --tensor-parallel-size 8" in text


def test_a_request_longer_than_the_context_is_refused(folder):
    model = folder(LLAMA_8B)
    text, flag = refusal(model, "H200", Wanted(4000, 200), max_model_len=4096)
    assert flag == "input_len"
    assert text.endswith("more than the --max-model-len=4096 of a sequence here; raise --max-model-len to 4200")
    text, _ = refusal(model, "H200", Wanted(131_000, 200))
    assert text.endswith("the model has 131072 positions: lower --input-len or --output-len")
    text, _ = refusal(model, "L4", Wanted(100_000, 200))
    assert "no more fits the memory. Any of these does: --tensor-parallel-size 2" in text


@pytest.mark.parametrize(
    ("asked", "context", "lengths"),
    [
        ((None, None), 131072, (1024, 256)),
        ((None, None), 1024, (768, 256)),
        ((None, None), 512, (384, 128)),
        ((1000, None), 1024, (1000, 24)),
        ((None, 1000), 1024, (24, 1000)),
        ((2000, None), 1024, (2000, 1)),
        ((7, 9), 1024, (7, 9)),
    ],
)
def test_lengths_of_which_nothing_is_said_fit_the_context(asked, context, lengths):
    load = Wanted(*asked).within(context)
    assert (load.input_len, load.output_len) == lengths


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"rps": 0}, "rps"),
        ({"ttft": float("nan")}, "ttft"),
        ({"tpot": -1}, "tpot"),
        ({"share": 1.5}, "roofline_share"),
        ({"output_len": 0}, "output_len"),
    ],
)
def test_loads_that_are_none_are_refused_by_flag(values, flag):
    with pytest.raises(ConfigError) as error:
        ExpectedLoad(**{"input_len": 1, "output_len": 1, **values})
    assert error.value.flag == flag


def test_blocks_that_no_attention_of_gpus_takes_are_told(folder):
    model = folder(LLAMA_8B)
    small, large = (
        plan_capacity(EngineConfig(model, block_size=size), "H200", Wanted()).public()["notes"] for size in (8, 16)
    )
    assert "--block-size" in small[0]
    assert large == []


def test_an_fp8_cache_holds_twice_the_tokens_where_the_gpu_has_fp8(folder):
    model = folder(LLAMA_8B)
    plain, fp8 = (
        plan_capacity(EngineConfig(model, kv_cache_dtype=kind), "H200", Wanted()).public()["kv_tokens"]
        for kind in ("auto", "fp8")
    )
    assert fp8 == pytest.approx(2 * plain, rel=0.001)
    with pytest.raises(ConfigError, match="A100-80GB has no fp8; use kv_cache_dtype=auto") as refused:
        plan_capacity(EngineConfig(model, kv_cache_dtype="fp8"), "A100-80GB", Wanted())
    assert refused.value.flag == "kv_cache_dtype"


def test_the_engine_chooses_dtype_and_context_alike_without_a_gpu():
    full = resolve_for(EngineConfig("model"), ModelConfig.of(LLAMA_8B), "cuda")
    assert (full.device, full.dtype, full.max_model_len) == ("cuda", "bfloat16", 131072)


def squadron(*args):
    code = "from deploy.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "plan", *args], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_command_prints_lines_or_json(folder):
    model = folder(LLAMA_8B)
    shown = squadron(model, "--gpu", "h200", "--tp", "2", "--rps", "100")
    assert shown.returncode == 0, shown.stderr
    assert "8.0 billion parameters, bfloat16, on 2 x H200" in shown.stdout
    assert "100 requests/s need" in shown.stdout
    plain = squadron(model, "--gpu", "H200", "--max-model-len", "8192", "-q", "fp8", "--json")
    found = json.loads(plain.stdout)
    assert found["quantization"] == "fp8"
    assert found["max_model_len"] == 8192
    assert found["bytes"]["allowed"] >= sum(found["bytes"][part] for part in ("weights", "step", "other", "kv_cache"))


def test_the_command_refuses_in_one_sentence_and_exit_code_1(folder):
    shown = squadron(folder(LLAMA_70B), "--gpu", "L4")
    assert (shown.returncode, shown.stdout) == (1, "")
    assert shown.stderr.startswith("Error: of each L4 the weights take")
    assert shown.stderr.count("\n") == 1
