"""Models served with the Triton attention kernels, in Triton's interpreter, and how that backend is chosen."""

from types import SimpleNamespace

import pytest
import torch

from engine.attention.select import select_backend
from engine.attention.triton_fit import why_not_triton
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.runner import ModelRunner
from parallel.group import SoloGroup
from tests.parity.stepping import Sequence, Stepper
from tests.parity.tiny_models import check_against, make, prompts
from tests.unit.paged_lab import spec

BF16 = {"dtype": torch.bfloat16, "head_dim": 64}


def generate(stepper, prompts_):
    """Run prompts in chunks of 12 tokens and 3 tokens from each, chunks beside decodes."""
    sequences = [Sequence(list(prompt)) for prompt in prompts_]
    while short := [i for i, s in enumerate(sequences) if len(s.logits) < 3]:
        stepper.step({i: min(12, len(sequences[i].tokens) - sequences[i].computed) for i in short}, sequences)
    return sequences


@pytest.mark.parametrize("name", ["qwen3", "qwen2_windows", "gpt2"])
def test_greedy_tokens_are_those_of_the_reference(tmp_path, name):
    model = make(name, tmp_path)
    ragged = prompts(3, longest=20, seed=5)
    tokens = {}
    for backend in ("triton", "reference"):
        config = EngineConfig(
            str(tmp_path), num_kv_blocks=40, block_size=16, max_num_batched_tokens=64, attention_backend=backend
        )
        runner = ModelRunner(config.resolved(device="cpu"), SoloGroup())
        assert runner.attention_backend == backend
        sequences = generate(Stepper(runner), ragged)
        check_against(model, sequences, ragged)
        tokens[backend] = [sequence.tokens for sequence in sequences]
    assert tokens["triton"] == tokens["reference"]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as far as the choice of a backend looks; returns a function that sets its compute capability."""

    def of(*capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    of(9, 0)
    for where in ("select.FlashAttention", "triton.TritonAttention", "select.ReferenceAttention"):
        name = where.split(".")[1].removesuffix("Attention").lower()
        monkeypatch.setattr(f"engine.attention.{where}", lambda spec, name=name: SimpleNamespace(name=name))
    return of


def on_gpu(**values):
    return spec(**{**BF16, "device": torch.device("cuda"), **values})


def installed(monkeypatch, *packages):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in packages else None)


@pytest.mark.parametrize(
    ("packages", "block_size", "chosen", "said"),
    [
        (("triton", "flash_attn"), 256, "flash", "attention backend: flash"),
        (
            ("triton", "flash_attn"),
            16,
            "triton",
            "flash cannot be used: FlashAttention-2: its pages are multiples of 256",
        ),
        (("triton",), 256, "triton", "FlashAttention-2: the package flash-attn is not installed; FlashAttention-3: "),
        ((), 16, "reference", "triton cannot be used: the package triton is not installed"),
    ],
)
def test_a_gpu_gets_the_best_that_fits_and_the_log_says_why(
    gpu, monkeypatch, caplog, packages, block_size, chosen, said
):
    caplog.set_level("INFO")
    installed(monkeypatch, *packages)
    assert select_backend("auto", on_gpu(block_size=block_size)).name == chosen
    assert said in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"head_dim": 512}, "head size 512"),
        ({"head_dim": 20}, "head size 20"),
        ({"block_size": 8}, "set block_size to 16"),
        ({"dtype": torch.float64}, "float32, bfloat16 or float16"),
        ({"num_heads": 512, "num_kv_heads": 1}, "512 query heads"),
    ],
)
def test_it_says_why_it_cannot_be_used(gpu, values, reason):
    assert reason in why_not_triton(on_gpu(**values))
    assert why_not_triton(on_gpu()) is None


def test_old_gpus_are_refused(gpu):
    gpu(7, 5)
    assert why_not_triton(on_gpu()) == "it needs compute capability 8.0, this GPU has 7.5"


def test_a_cpu_is_refused_unless_the_interpreter_is_asked_for(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match=r"triton cannot be used.*CUDA device; TRITON_INTERPRET=1") as refused:
        select_backend("triton", spec())
    assert refused.value.flag == "attention_backend"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_backend("triton", spec()).name == "triton"
    assert select_backend("auto", spec()).name != "triton"
