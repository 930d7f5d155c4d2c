"""`squadron plan`: what fits, what does not, and what comes nearest."""

from __future__ import annotations

import json
import logging
import re
import sys

import pytest

from deploy.capacity.fit import CONTEXT_BYTES, NCCL_BYTES, Asked, _weights, fit
from deploy.capacity.gpus import GPUS, gpu_named
from deploy.capacity.load import Wanted
from deploy.capacity.plan import plan_capacity
from deploy.cli.terminal import GIB
from deploy.main import explain, main
from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.models.config import ModelConfig
from engine.resolve import resolve_for
from tests.deploy.capacity.shapes import QWEN3_30B_A3B
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


@pytest.fixture
def squadron(monkeypatch, capsys):
    """Runs `squadron plan` in this process; returns its exit code and what it printed."""
    logger = logging.getLogger("engine.kv.cache_size")
    before = logger.level

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["squadron", "plan", *args])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    yield run
    logger.setLevel(before)


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
        ("RTX-PRO-6000", 94.97),
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
    assert gpu_named("NVIDIA GH200 480GB") is GPUS["GH200"]
    assert gpu_named("NVIDIA B300 SXM6 AC") is GPUS["B300"]
    assert gpu_named("NVIDIA GB200") is GPUS["GB200"]
    assert gpu_named("NVIDIA A10G") is GPUS["A10G"], "of AWS, with half of an A10's matrix units"
    # Of cards no NVSwitch joins more than two.
    for card in ("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA H100 PCIe"):
        assert gpu_named(card).link.ranks == 2, card
    assert gpu_named("NVIDIA RTX PRO 6000 Blackwell Server Edition") is GPUS["RTX-PRO-6000"]
    with pytest.raises(ConfigError, match="did you mean L40S"):
        gpu_named("L40SS")
    with pytest.raises(ConfigError, match=r"known: .*H200, "):
        gpu_named("tpu")


def test_weights_that_do_not_fit_name_ranks_and_gpu_that_do(folder):
    model = folder(LLAMA_70B)
    text, flag = refusal(model, "H200")
    assert flag == "tensor_parallel_size"
    assert "the weights take 131.5 GiB" in text
    changes = "--tensor-parallel-size 2, --quantization fp8, --quantization int4, --gpu B200"
    assert text.endswith(f"Any of these does: {changes}")
    plan_capacity(EngineConfig(model, tensor_parallel_size=2), "H200", Wanted())
    plan_capacity(EngineConfig(model, quantization="fp8"), "H200", Wanted())
    plan_capacity(EngineConfig(model, quantization="int4"), "H200", Wanted())
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


def test_room_for_one_sequence_is_said_with_what_makes_more(folder):
    alone = plan_capacity(EngineConfig(folder(LLAMA_8B), max_model_len=16384), "L4", Wanted())
    assert alone.fit.whole_sequences == 1
    assert "  It fits one sequence of 16,384 tokens at a time." in alone.lines()
    short = plan_capacity(EngineConfig(folder(LLAMA_8B), max_model_len=64), "H100", Wanted())
    assert re.search(r"It fits [\d,]+ sequences of 64 tokens", "\n".join(short.lines()))
    (note,) = alone.public()["notes"]
    changes = "--tensor-parallel-size 2 or --quantization fp8 or --quantization int4 or --kv-cache-dtype fp8"
    assert note.endswith(f"More fit with {changes}.")
    for settings in ({"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}):
        more = plan_capacity(EngineConfig(folder(LLAMA_8B), max_model_len=16384, **settings), "L4", Wanted())
        assert more.fit.whole_sequences > 1
        assert more.public()["notes"] == []


@pytest.mark.parametrize(
    ("gpu", "quantization", "offered"),
    [
        ("L4", None, ["--quantization fp8", "--quantization int4"]),
        ("A10", None, ["--quantization int8", "--quantization int4"]),
        ("L4", "int4", []),
    ],
)
def test_weights_that_the_gpu_multiplies_are_offered_and_none_that_are_quantised_already(gpu, quantization, offered):
    config = EngineConfig("model", max_model_len=32768, quantization=quantization)
    assert list(_weights(Asked(config, ModelConfig.of(LLAMA_8B), GPUS[gpu]))) == offered


def test_ranks_on_several_hosts_are_counted_over_a_network_and_that_is_told(folder):
    model = folder(LLAMA_70B)
    near, far = (plan_capacity(EngineConfig(model, tensor_parallel_size=size), "H100", Wanted()) for size in (8, 16))
    assert near.public()["link"] == "NVLink 4"
    assert near.public()["notes"] == []
    assert "InfiniBand NDR of 400 Gb/s" in far.public()["notes"][0]
    assert far.decode[1].exchanges > 3 * near.decode[1].exchanges


def test_nodes_of_four_gpus_join_eight_ranks_by_a_network(folder):
    config = EngineConfig(folder(LLAMA_70B), tensor_parallel_size=8)
    eight, four = (plan_capacity(config, "H100", Wanted(), count) for count in (None, 4))
    assert (eight.public()["link"], four.public()["link"]) == ("NVLink 4", "InfiniBand NDR")
    assert "several nodes" in four.public()["notes"][0]
    assert four.decode[1].seconds > eight.decode[1].seconds


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


def test_a_cache_of_so_many_bytes_is_planned_whatever_share_of_the_gpu_may_be_used(folder, squadron):
    model, given = folder(LLAMA_8B), {"kv_cache_memory_bytes": 4 << 30}
    found = plan_capacity(EngineConfig(model, gpu_memory_utilization=0.01, **given), "H100", Wanted()).fit
    assert 0 <= (4 << 30) - found.kv_bytes < found.footprint.block_bytes
    assert found.allowed_bytes == GPUS["H100"].total_bytes
    _, shown, _ = squadron(model, "--gpu", "H100", "--kv-cache-memory-bytes", "4G", "--max-model-len", "32k")
    assert "KV cache                   4.0 GiB  32,736 tokens" in shown
    assert "--gpu-memory-utilization" not in shown


def test_more_bytes_of_cache_than_are_left_are_refused_with_how_many_are(folder):
    model = folder(LLAMA_8B)
    text, flag = refusal(model, "H100", kv_cache_memory_bytes=200 << 30)
    assert flag == "kv_cache_memory_bytes"
    most = int(text.split("lower it to ")[1].split(".")[0])
    assert text.endswith("Any of these does: leaving --kv-cache-memory-bytes out, --gpu B300")
    found = plan_capacity(EngineConfig(model, kv_cache_memory_bytes=most), "H100", Wanted()).fit
    assert most - found.kv_bytes < found.footprint.block_bytes


def test_bytes_of_cache_that_hold_no_context_are_refused_with_how_many_do():
    with pytest.raises(ConfigError, match="fewer than max_model_len=131072") as refused:
        held(gpu="H100", kv_cache_memory_bytes=1000)
    assert refused.value.flag == "kv_cache_memory_bytes"
    least = int(str(refused.value).split("raise kv_cache_memory_bytes to ")[1])
    assert held(gpu="H100", kv_cache_memory_bytes=least).config.context_len == 131072
    with pytest.raises(ConfigError, match="fewer than"):
        held(gpu="H100", kv_cache_memory_bytes=least - 1, max_model_len=131072)


def test_a_context_beyond_the_model_is_refused_as_the_engine_does(folder):
    text, flag = refusal(folder(LLAMA_8B), "H200", max_model_len=200_000)
    assert flag == "max_model_len"
    assert "beyond the model's 131072 positions" in text
    assert "--max-model-len 131072" in text


def test_a_folder_without_a_config_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        plan_capacity(EngineConfig(str(tmp_path)), "H200", Wanted(1, 1))


def test_a_target_that_no_request_meets_names_what_does(folder):
    model = folder(LLAMA_70B)
    text, flag = refusal(model, "H200", Wanted(1024, 256, ttft=0.12), tensor_parallel_size=2)
    assert flag == "ttft"
    assert "--ttft=0.12 s cannot be met" in text
    assert "--tensor-parallel-size 4, --quantization fp8" in text
    plan_capacity(EngineConfig(model, tensor_parallel_size=4), "H200", Wanted(1024, 256, ttft=0.12))
    plan_capacity(
        EngineConfig(model, tensor_parallel_size=2, quantization="fp8"), "H200", Wanted(1024, 256, ttft=0.12)
    )


def test_a_target_that_nothing_meets_says_so(folder):
    model, load = folder(LLAMA_70B), Wanted(1024, 256, ttft=1e-6)
    text, _ = refusal(model, "L4", load, tensor_parallel_size=16)
    assert text.endswith("for one request alone, at the measured speed")
    text, _ = refusal(model, "L4", load, tensor_parallel_size=4)
    assert "No single change bears the load; the model fits with --tensor-parallel-size 8" in text


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ({"rps": 0}, "--rps must be above 0 and at most 1,000,000,000 requests a second, such as 20, not 0"),
        ({"rps": -3}, "such as 20, not -3"),
        ({"rps": 1e308}, "such as 20, not 1e+308"),
        ({"rps": float("nan")}, "such as 20, not nan"),
        ({"ttft": -1}, "seconds, such as 1, not -1"),
        ({"tpot": 0}, "seconds, such as 0.05, not 0"),
    ],
)
def test_loads_that_nobody_means_are_refused_with_one_that_works(folder, load, words):
    assert words in refusal(folder(LLAMA_8B), "H200", Wanted(**load))[0]


def test_experts_that_are_whole_on_a_rank_are_planned_and_that_no_graph_replays_them_is_told(folder):
    model = folder(QWEN3_30B_A3B)
    split, whole = (
        plan_capacity(EngineConfig(model, tensor_parallel_size=4, enable_expert_parallel=each), "H100", Wanted())
        for each in (False, True)
    )
    assert split.public()["notes"] == []
    assert "No CUDA graph replays its steps, as ranks with whole experts wait" in whole.public()["notes"][0]
    assert whole.decode[1].bound == "host"


def test_a_request_longer_than_the_context_is_refused(folder):
    model = folder(LLAMA_8B)
    text, flag = refusal(model, "H200", Wanted(4000, 200), max_model_len=4096)
    assert flag == "input_len"
    assert text.endswith("more than the --max-model-len=4096 of a sequence here; raise --max-model-len to 4200")
    text, _ = refusal(model, "H200", Wanted(131_000, 200))
    assert text.endswith("the model has 131072 positions: lower --input-len or --output-len")
    text, _ = refusal(model, "L4", Wanted(100_000, 200))
    assert "no more fits the memory. Any of these does: --tensor-parallel-size 2" in text


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


def test_the_command_prints_lines_or_json(folder, squadron):
    model = folder(LLAMA_8B)
    code, shown, told = squadron(model, "--gpu", "h200", "--tp", "2", "--rps", "100", "--gpus-per-node", "1")
    assert code == 0, told
    assert "8.0 billion parameters, bfloat16, on 2 x H200" in shown
    assert "100 requests/s need" in shown
    assert "sums over InfiniBand NDR" in shown
    found = json.loads(squadron(model, "--gpu", "H200", "--max-model-len", "8192", "-q", "fp8", "--json")[1])
    assert found["quantization"] == "fp8"
    assert found["max_model_len"] == 8192
    assert found["bytes"]["allowed"] >= sum(found["bytes"][part] for part in ("weights", "step", "other", "kv_cache"))


def test_the_command_chooses_gpus_and_runs_the_peak(folder, squadron):
    model = folder(LLAMA_8B)
    load = ("--rps", "2", "--input-len", "64", "--output-len", "8", "--max-model-len", "4096")
    code, shown, told = squadron(model, "--gpu", "auto", *load, "--simulate", "-tp", "1")
    assert code == 0, told
    first = shown.splitlines()
    assert first[0] == "GPUs that bear the load, by GB of GPU memory"
    assert "1 x RTX-3090" in first[1]
    assert "in virtual time: 300 requests" in shown
    plain = squadron(model, "--gpu", "L4", *load, "--spare-replicas", "0", "--headroom", "0", "--json")
    found = json.loads(plain[1])
    assert (found["service"]["replicas"], found["rehearsal"]) == (1, None)
    code, shown, told = squadron(model, "--gpu", "L4", "--ttft", "500ms")
    assert (code, shown) == (2, "")
    assert "--ttft" in told
    assert "'500ms' is no number of seconds; write 0.5" in " ".join(told.replace("│", " ").split())
    code, _, told = squadron(model, "--gpu", "L4", "--headroom", "1")
    assert (code, told) == (1, "Error: --headroom must be from 0 and below 1 (0.2 is usual), not 1\n")


def test_the_command_refuses_in_one_sentence_and_exit_code_1(folder, squadron):
    code, shown, told = squadron(folder(LLAMA_70B), "--gpu", "L4")
    assert (code, shown) == (1, "")
    assert told.startswith("Error: of each L4 the weights take")
    assert told.count("\n") == 1
