"""`squadron doctor MODEL`: whether it is there, readable, fits, and what multiplies its weights."""

from __future__ import annotations

import json
import shutil

import pytest

from deploy.capacity.gpus import GPUS, REPORTED, Gpu
from deploy.cli.terminal import GIB
from deploy.demo import demo_model_path
from deploy.doctor.checks import Level, ProbeError
from deploy.doctor.model import model_findings
from deploy.doctor.probes.model import _on_gpus, read
from engine.models.config import ModelConfig
from tests.engine.worker.test_footprint import LLAMA_70B

ON_CPU = {"gpu": False, "fp8": False, "compiled": "avx512_bf16"}
ON_GPU = {"gpu": True, "fp8": True}
REPORT = {
    "architecture": "LlamaForCausalLM",
    "folder": "/models/llama",
    "files": 4,
    "size": 15 * GIB,
    "method": None,
    "weights": None,
    "blocks": False,
    "products": ON_GPU,
    "device": "cuda",
    "gpus": 2,
    "gpu": "NVIDIA H200",
    "ranks": 1,
    "context": 131072,
    "positions": 131072,
}


def found(**values):
    return {each.check: each for each in model_findings("llama", lambda: REPORT | values)}


def test_a_model_that_is_there_and_fits():
    all_well = found()
    assert {each.level for each in all_well.values()} == {Level.OK}
    assert "4 weight files of 15.0 GiB, readable, in /models/llama" in all_well["model"].text
    assert "fits 1 of 2 x NVIDIA H200, with a context of 131,072 tokens" in all_well["model memory"].text
    assert "fp8 and int8 and int4 of --quantization" in all_well["model weights"].text


def test_a_model_whose_weights_are_still_at_the_hub():
    there = found(folder=None)["model"]
    assert (there.level, there.remedy) == (Level.WARNING, "hf download llama")


def test_files_that_are_damaged_are_to_be_fetched_again():
    there = found(damage="model.safetensors: truncated")["model"]
    assert there.level is Level.FIX
    assert "truncated" in there.text


def test_a_model_that_is_none_is_told_in_the_engines_words():
    (only,) = model_findings("llama", lambda: {"error": "llama: config.json is missing"})
    assert (only.level, only.text) == (Level.FIX, "llama: config.json is missing")


def test_a_probe_that_does_not_answer_is_told():
    def hung():
        raise ProbeError("no answer within 65 s")

    (only,) = model_findings("llama", hung)
    assert only.level is Level.WARNING
    assert "no answer within 65 s" in only.text


def test_gpus_that_do_not_hold_it_say_why_and_a_short_context_is_a_warning():
    too_large = found(ranks=None, refusal="the weights take 131 GiB; raise gpu_memory_utilization")["model memory"]
    assert too_large.level is Level.FIX
    assert "raise --gpu-memory-utilization" in too_large.text
    short = found(context=8192)["model memory"]
    assert short.level is Level.WARNING
    assert "8,192 tokens of the model's 131,072" in short.text


@pytest.mark.parametrize(("free", "level"), [(4 * GIB, "fix"), (64 * GIB, "ok")])
def test_memory_of_a_cpu(free, level):
    memory = found(device="cpu", needed=16 * GIB, free=free, products=ON_CPU)["model memory"]
    assert memory.level == level
    assert "16.0 GiB are needed at least" in memory.text


@pytest.mark.parametrize(
    ("weights", "products", "level", "words"),
    [
        (None, ON_CPU, "ok", "plain; int8 and int4 of --quantization"),
        (None, ON_GPU | {"fp8": False}, "ok", "plain; int8 and int4 of --quantization"),
        ("int4", ON_GPU, "ok", "as they are here in steps of few rows and of experts"),
        ("fp8", ON_GPU, "ok", "fp8, by gptq: multiplied as they are here"),
        ("fp8", ON_GPU | {"fp8": False}, "warning", "here made plain"),
        ("mxfp4", ON_CPU, "ok", "multiplied as they are here"),
        ("mxfp4", ON_CPU | {"compiled": None}, "warning", "here made plain"),
        ("int8", ON_CPU | {"compiled": None}, "ok", "multiplied as they are here"),
    ],
)
def test_what_multiplies_the_weights(weights, products, level, words):
    held = found(weights=weights, method=weights and "gptq", products=products)["model weights"]
    assert held.level == level
    assert words in held.text


@pytest.mark.parametrize(
    ("products", "level", "words"),
    [
        (ON_CPU, "ok", "multiplied as they are here"),
        (ON_CPU | {"compiled": None}, "warning", "here made plain"),
        (ON_GPU, "ok", "as they are here in steps of few rows and of experts"),
    ],
)
def test_what_multiplies_int8_by_groups(products, level, words):
    held = found(weights="int8", method="gptq", blocks=True, products=products)["model weights"]
    assert held.level == level
    assert words in held.text


# The probe.


def gpus(count, name="H200"):
    gpu = GPUS[name]
    here = Gpu(gpu.name, gpu.total_bytes / GIB / REPORTED, bandwidth=1, fp32=1, bf16=1)
    return [here] * count


def test_the_fewest_gpus_that_hold_it_are_found():
    model = ModelConfig.of(LLAMA_70B)
    assert _on_gpus("model", model, gpus(4))["ranks"] == 2
    alone = _on_gpus("model", model, gpus(1))
    assert alone["ranks"] is None
    assert "the weights take 131.5 GiB" in alone["refusal"]


def test_the_demo_model_is_read_as_it_is_here():
    report = read("demo")
    assert report["folder"] == str(demo_model_path())
    assert report["files"] == 1
    assert report["weights"] is None
    if report["device"] == "cpu":
        assert 0 < report["weight_bytes"] < report["needed"] < report["free"]
    assert {each.level for each in model_findings("demo", lambda: report)} == {Level.OK}


def test_a_folder_without_weights_or_with_damaged_ones(tmp_path):
    shutil.copytree(demo_model_path(), tmp_path, dirs_exist_ok=True)
    (weights,) = tmp_path.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    assert "truncated or damaged" in read(str(tmp_path))["damage"]
    weights.unlink()
    assert "damage" in read(str(tmp_path))
    assert (
        "is missing" in read(str(tmp_path / "none"))["error"] or "no folder" in read(str(tmp_path / "none"))["error"]
    )


def test_a_quantised_checkpoint_says_by_what(tmp_path):
    shutil.copytree(demo_model_path(), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = read(str(tmp_path))
    assert (report["method"], report["weights"], report["blocks"]) == ("fp8", "fp8", True)
