"""Models served with the Triton attention kernels, in Triton's interpreter, and how that backend is chosen."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.select import select_backend
from engine.attention.triton_fit import why_not_triton
from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.layers.base import Build
from engine.loader.checkpoint import open_model
from engine.loader.kv_scales import read_kv_scales
from engine.loader.weights import load_model
from engine.models.registry import family_of
from engine.resolve import check_model
from engine.worker.footprint import footprint_of
from engine.worker.invariance import check_invariance, fix_products
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from parallel.linear import ParallelLinear
from tests.engine.paged_lab import spec
from tests.interpreter import exact_halves
from tests.long import long
from tests.parallel.parallel_ranks import FakeGroup
from tests.parity.stepping import Sequence, Stepper
from tests.parity.tiny_models import check_against, make, oracle_logits, prompts

BF16 = {"dtype": torch.bfloat16, "head_dim": 64}


def generate(stepper, prompts_):
    """Run prompts in chunks of 12 tokens and 3 tokens from each, chunks beside decodes."""
    sequences = [Sequence(list(prompt)) for prompt in prompts_]
    while short := [i for i, s in enumerate(sequences) if len(s.logits) < 3]:
        stepper.step({i: min(12, len(sequences[i].tokens) - sequences[i].computed) for i in short}, sequences)
    return sequences


@pytest.mark.parametrize("name", [long("qwen3"), "qwen2_windows", "gpt2"])
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
        made = lambda spec, torchs=None, name=name: SimpleNamespace(name=name, torchs=torchs)  # noqa: E731
        monkeypatch.setattr(f"engine.attention.{where}", made)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    return of


def on_gpu(**values):
    return spec(**{**BF16, "device": torch.device("cuda"), **values})


def installed(monkeypatch, *packages):
    known = (*packages, "torch.nn.attention.varlen")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in known else None)


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
    assert len([record for record in caplog.records if "backend" in record.message]) == 1


@pytest.mark.parametrize(
    ("values", "capability", "built", "reason"),
    [
        ({}, (9, 0), True, None),
        ({"windows": (0, 64)}, (8, 0), True, None),
        ({"softcap": 50.0}, (9, 0), True, "it has no softcap"),
        ({"dtype": torch.float32}, (9, 0), True, "float16 or bfloat16, not float32"),
        ({"batch_invariant": True}, (9, 0), True, "depends on the batch"),
        ({}, (9, 0), False, "this torch was built without FlashAttention"),
    ],
)
def test_whole_prompts_go_to_torch_where_it_serves_them(gpu, monkeypatch, caplog, values, capability, built, reason):
    """The next best where FlashAttention-3, which takes them all, is not installed."""
    caplog.set_level("INFO")
    installed(monkeypatch, "triton")
    gpu(*capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    found = select_backend("auto", on_gpu(**values))
    assert found.name == "triton"
    assert (found.torchs is None) == (reason is not None)
    told = "triton; torch's varlen_attn cannot be used: " if reason else "torch's varlen_attn"
    assert f"attention of whole prompts: {told}" in caplog.text
    assert (reason or "") in caplog.text


def test_flash_3_takes_prompts_and_decodes_where_it_is_installed(gpu, monkeypatch):
    installed(monkeypatch, "triton", "flash_attn_interface")
    monkeypatch.setattr("engine.attention.select.Flash3Attention", lambda spec: SimpleNamespace(name="flash 3"))
    assert select_backend("auto", on_gpu()).name == "flash 3"


def test_who_asks_for_triton_gets_it_alone(gpu, monkeypatch):
    installed(monkeypatch, "triton")
    assert select_backend("triton", on_gpu()).torchs is None
    assert select_backend("auto", on_gpu(fp8_cache=True)).torchs is None  # whose keys are those that it holds


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"head_dim": 512}, "head size 512"),
        ({"head_dim": 20}, "head size 20"),
        ({"block_size": 8}, "set block_size to 16"),
        ({"dtype": torch.float64}, "float32, bfloat16 or float16"),
        ({"num_heads": 512, "num_kv_heads": 1}, "512 query heads"),
        ({"num_heads": 128, "num_kv_heads": 1, "head_dim": 256}, "128 query heads of size 256 in bfloat16"),
        ({"num_heads": 70, "num_kv_heads": 1, "head_dim": 80, "dtype": torch.float32}, "70 query heads of size 80"),
    ],
)
def test_it_says_why_it_cannot_be_used(gpu, values, reason):
    assert reason in why_not_triton(on_gpu(**values))
    assert why_not_triton(on_gpu()) is None


@pytest.mark.parametrize("wanted", ["flash", "native", "reference"])
def test_an_fp8_cache_is_refused_to_backends_that_have_none(wanted):
    with pytest.raises(
        ConfigError, match=f"attention_backend=triton: {wanted} keeps.*kv_cache_dtype=auto"
    ) as refused:
        select_backend(wanted, spec(fp8_cache=True))
    assert refused.value.flag == "kv_cache_dtype"


def test_an_fp8_cache_takes_triton_on_gpus_that_have_fp8(gpu, monkeypatch):
    installed(monkeypatch, "triton", "flash_attn")
    assert select_backend("auto", on_gpu(block_size=256, fp8_cache=True)).name == "triton"
    gpu(8, 0)
    with pytest.raises(ConfigError, match=r"compute capability 8.9, this GPU has 8.0; use kv_cache_dtype=auto"):
        select_backend("auto", on_gpu(fp8_cache=True))


@pytest.mark.parametrize("wanted", ["auto", "flash", "reference", "torch_varlen"])
def test_batch_invariance_is_had_from_triton_or_refused(gpu, monkeypatch, wanted):
    installed(monkeypatch, "triton", "flash_attn")
    chosen = partial(select_backend, wanted, on_gpu(block_size=256, batch_invariant=True))
    if wanted == "auto":
        assert chosen().name == "triton"
        return
    with pytest.raises(ConfigError, match=r"batch_invariant cannot be had here.*attention_backend=auto") as refused:
        chosen()
    assert refused.value.flag == "batch_invariant"


@pytest.mark.parametrize(
    ("ranks", "in_order", "device", "dtype", "said"),
    [
        (2, False, "cuda:0", "float16", None),
        (4, True, "cuda:0", "bfloat16", None),
        (4, False, "cuda:0", "bfloat16", r"tensor_parallel_size=4.*at most 2"),
        (4, True, "cuda:0", "float16", "set dtype=bfloat16"),
        (4, True, "cpu", "float16", None),
        (3, False, "cpu", "float32", r"tensor_parallel_size=3.*at most 2"),
    ],
)
def test_sums_over_more_than_two_ranks_need_a_fixed_order(gpu, ranks, in_order, device, dtype, said):
    group = FakeGroup(0, ranks)
    group.sums_in_order, group.device = in_order, torch.device(device)
    for wanted in (False, True):
        config = EngineConfig("model", batch_invariant=wanted, tensor_parallel_size=ranks, dtype=dtype)
        with pytest.raises(ConfigError, match=said) if wanted and said else nullcontext():
            check_invariance(config, group)


def test_every_product_gets_one_tiling(tmp_path):
    make("qwen3", tmp_path)
    folder = open_model(str(tmp_path))
    model = load_model(folder, 64, SoloGroup(), torch.float32)
    fix_products(model)
    layers = [layer for layer in model.modules() if isinstance(layer, ParallelLinear)]
    assert len(layers) == 4 * folder.config.num_layers + 1
    assert {type(layer.method).__name__ for layer in layers} == {"TritonLinear"}


@pytest.mark.parametrize("quantization", ["fp8", "int8", "compressed-tensors"])
def test_quantised_weights_are_refused_before_they_are_read(gpu, quantization):
    group = FakeGroup(0, 1)
    group.device = torch.device("cuda:0")
    config = EngineConfig("model", batch_invariant=True, quantization=quantization)
    with pytest.raises(ConfigError, match=f"weights in {quantization}.*unquantised checkpoint") as refused:
        check_invariance(config, group)
    assert refused.value.flag == "batch_invariant"
    check_invariance(replace(config, quantization=None), group)
    check_invariance(config, FakeGroup(0, 1))  # a CPU's have the same bits in any company


@pytest.mark.parametrize(("kind", "ranks", "refused"), [("olmo2", 2, True), ("olmo2", 1, False), ("qwen3", 2, False)])
def test_norms_over_heads_of_several_ranks_are_refused(kind, ranks, refused, tmp_path):
    make(kind, tmp_path)
    config = EngineConfig(
        str(tmp_path),
        device="cuda",
        dtype="bfloat16",
        tensor_parallel_size=ranks,
        batch_invariant=True,
        max_model_len=64,
    )
    said = pytest.raises(ConfigError, match=r"Olmo2's norms over several ranks .* set tensor_parallel_size=1")
    with said if refused else nullcontext():
        check_model(config, open_model(str(tmp_path)).config)


def test_it_is_refused_where_triton_cannot_run(gpu):
    gpu(7, 5)
    group = FakeGroup(0, 1)
    group.device = torch.device("cuda:0")
    with pytest.raises(ConfigError, match=r"batch_invariant needs Triton.*compute capability 8\.0"):
        check_invariance(EngineConfig("model", batch_invariant=True), group)


def save_scales(folder, scales):
    tensors = load_file(folder / "model.safetensors") | {name: torch.tensor(s) for name, s in scales.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def built(folder, rank=0, size=1):
    """A model of which no weight is read."""
    group = SoloGroup()
    group.rank, group.size = rank, size
    config = open_model(str(folder)).config
    return family_of(config.architecture, config.implementation)(config, Build(group, torch.float32, 64))


def test_a_model_is_served_with_an_fp8_cache_half_as_large(tmp_path, caplog):
    """Logits stay near those of the model's own dtype: keys and values keep 4 significant bits."""
    caplog.set_level("INFO")
    model = make("qwen3", tmp_path)
    ragged = prompts(3, longest=20, seed=5)
    values = {"num_kv_blocks": 40, "max_num_batched_tokens": 64, "attention_backend": "triton"}
    config = EngineConfig(str(tmp_path), kv_cache_dtype="fp8", **values)
    runner = ModelRunner(config.resolved(device="cpu"), SoloGroup())
    assert "brings no k_scale" in caplog.text
    cache = runner._cache
    assert cache.layers[0].keys.dtype is torch.float8_e4m3fn
    assert (
        sum(each.nbytes for each in cache.tensors)
        == 40 * footprint_of(runner.config, runner.model_config).block_bytes
    )
    with exact_halves():
        sequences = generate(Stepper(runner), ragged)
    for sequence, prompt in zip(sequences, ragged, strict=True):
        expected = oracle_logits(model, sequence.tokens)[len(prompt) - 1 : -1]
        similar = torch.cosine_similarity(torch.stack(sequence.logits), expected)
        assert 0.95 < similar.min() < 0.999999  # of random weights, which tell keys apart by little


def test_scales_come_from_the_checkpoint(tmp_path):
    make("qwen3", tmp_path)
    scales = {"0.self_attn.k_scale": 0.5, "1.self_attn.attn.v_scale": [2.0], "1.self_attn.k_proj.k_scale": 4.0}
    save_scales(tmp_path, {f"model.layers.{name}": scale for name, scale in scales.items()})
    scales = torch.stack(read_kv_scales(tmp_path, built(tmp_path)))
    assert scales[:2, :, 0].tolist() == [[0.5, 1.0], [4.0, 2.0]]
    config = EngineConfig(str(tmp_path), device="cpu", num_kv_blocks=40, max_num_batched_tokens=64)
    assert ModelRunner(config, SoloGroup()).attention_backend != "triton"  # they are there, and not needed


def test_scales_of_nemotrons_mixers_come_from_the_checkpoint(tmp_path):
    make("nemotron_h", tmp_path)
    mixer = "backbone.layers.2.mixer"
    save_scales(tmp_path, {f"{mixer}.k_proj.k_scale": 0.5, f"{mixer}.v_proj.v_scale": 2.0})
    (scales,) = [each for each in read_kv_scales(tmp_path, built(tmp_path)) if each is not None]
    assert scales[:, 0].tolist() == [0.5, 2.0]
    ModelRunner(EngineConfig(str(tmp_path), device="cpu", num_kv_blocks=40), SoloGroup())  # and need not be read


def test_each_rank_has_the_scales_of_its_heads(tmp_path):
    make("qwen3", tmp_path)
    assert built(tmp_path).attention[0].all_kv_heads == 2
    save_scales(tmp_path, {"model.layers.0.self_attn.k_scale": [0.5, 3.0]})
    for rank, scale in enumerate([0.5, 3.0]):
        assert read_kv_scales(tmp_path, built(tmp_path, rank, 2))[0].tolist() == [[scale], [1.0]]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), [1.0, 2.0, 3.0]])
def test_scales_that_are_none_are_refused(tmp_path, scale):
    make("qwen3", tmp_path)
    save_scales(tmp_path, {"model.layers.0.self_attn.k_scale": scale})
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.k_scale"):
        read_kv_scales(tmp_path, built(tmp_path))


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
