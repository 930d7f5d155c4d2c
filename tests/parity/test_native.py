"""The compiled kernels against torch, and their promise: a row's bits know no company."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.attention.native import NativeAttention, why_not_native_attention
from engine.attention.select import select_backend
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kernels import compiler
from engine.kernels.base import TorchKernels
from engine.kernels.native import SOURCES, NativeKernels
from engine.kernels.native_linear import product_library
from engine.kernels.select import select_kernels
from engine.worker.runner import ModelRunner
from parallel import c_library
from parallel.group import SoloGroup
from tests.parity.stepping import Sequence, Stepper
from tests.parity.test_native_attention import CPU, DTYPES, Cache, needs_compiler, spec, tokens
from tests.parity.tiny_models import CONFIGS, check_against, make, prompts


@pytest.fixture(params=compiler.isas() or [compiler.NATIVE])
def isa(request, monkeypatch):
    """Have kernels use what a CPU has that this one can be taken for."""
    monkeypatch.setenv(compiler.ISA_VARIABLE, request.param)
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def kernels(request, isa):
    found = select_kernels(64, request.param, CPU)
    if not isinstance(found, NativeKernels):
        pytest.skip("no C compiler on this machine")
    return found, request.param


def close(found, expected, dtype):
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("outs", "ins"), [(1, 2), (64, 64), (199, 96), (100, 770), (192, 2050), (70, 1568)])
def test_products_are_torchs(kernels, outs, ins):
    native, dtype = kernels
    weight, bias = torch.randn(outs, ins).to(dtype), torch.randn(outs).to(dtype)
    method = native.linear(weight)
    for rows in (0, 1, 2, 5, 6, 13, 17, 31, 256, 257, 600):
        x = torch.randn(rows, ins).to(dtype)
        for offsets in (None, bias):
            close(method.apply(x, offsets) / ins**0.5, F.linear(x, weight, offsets) / ins**0.5, dtype)


def test_a_product_has_the_same_bits_in_any_company(kernels):
    native, dtype = kernels
    method = native.linear(torch.randn(300, 2048).to(dtype))
    x = torch.randn(600, 2048).to(dtype)
    together = method.apply(x, None)
    for rows in (1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 33, 64, 100, 257, 300):
        assert torch.equal(method.apply(x[299 : 299 + rows], None), together[299 : 299 + rows])
    strided = torch.cat((x, x), dim=1)[:, :2048]
    assert torch.equal(method.apply(strided, None), together)


def test_a_weight_with_gaps_is_packed_as_what_it_shows(kernels):
    native, dtype = kernels
    weight = torch.randn(2048, 1024).to(dtype)
    method = native.linear(weight.t())
    x = torch.randn(3, 2048).to(dtype)
    assert torch.equal(method.apply(x, None), native.linear(weight.t().contiguous()).apply(x, None))


def test_a_product_refuses_what_it_would_read_past_the_end_of(kernels):
    native, dtype = kernels
    method = native.linear(torch.randn(64, 64).to(dtype))
    for x in (torch.randn(3, 62).to(dtype), torch.randn(3, 64).half(), torch.randn(64, 3).to(dtype).t()):
        with pytest.raises(ValueError, match="64"):
            method.apply(x, None)


def test_a_nan_or_infinity_stays_in_its_row_of_a_product(kernels):
    native, dtype = kernels
    method = native.linear(torch.randn(100, 64).abs().to(dtype))
    x = torch.randn(9, 64).to(dtype)
    x[4, 9], x[6, 63] = torch.nan, torch.inf
    out = method.apply(x, None)
    assert out[4].isnan().all()
    assert (out[6] == torch.inf).all()
    assert out[[0, 1, 2, 3, 5, 7, 8]].isfinite().all()


def test_sums_are_rounded_to_the_nearest_and_even(kernels):
    native, dtype = kernels
    bits = torch.randint(-(2**31), 2**31 - 1, (2, 64, 1024)).to(torch.int32).view(torch.float32)  # of every kind
    x, residual = bits.to(dtype)
    residual[0] = (x[0].float() / 256).to(dtype)  # so that sums lie between two values, and half-way
    expected = (x.float() + residual.float()).to(dtype)
    native.add_rms_norm(residual, x, torch.ones(1024, dtype=dtype), 1e-5)
    assert torch.equal(residual.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(residual.isnan(), expected.isnan())


def test_the_exponential_is_good_to_a_few_units_in_the_last_place():
    native = select_kernels(64, torch.float32, CPU)
    if not isinstance(native, NativeKernels):
        pytest.skip("no C compiler on this machine")
    gate = torch.linspace(-86.9, 80, 160000).view(10, -1)
    found = native.silu_gate(torch.cat((gate, torch.ones_like(gate)), 1)).double()
    expected = gate.double() / (1 + (-gate.double()).exp())
    assert ((found - expected).abs() <= 4e-7 * expected.abs()).all()


def test_norms_of_other_layouts_and_dtypes_are_left_to_torch(kernels):
    native, dtype = kernels
    wide, weight = torch.randn(30, 128).to(dtype), torch.randn(64).to(dtype)
    close(native.rms_norm(wide[:, :64], weight, 1e-5), TorchKernels().rms_norm(wide[:, :64], weight, 1e-5), dtype)
    double = torch.randn(30, 64).double()
    found = native.rms_norm(double, weight.double(), 1e-5)
    torch.testing.assert_close(found, TorchKernels().rms_norm(double, weight.double(), 1e-5))


def test_products_of_another_dtype_are_left_to_others(kernels):
    native, dtype = kernels
    assert native.linear(torch.randn(64, 64).to(torch.bfloat16 if dtype is torch.float32 else torch.float32)) is None


def test_an_odd_width_is_left_to_others_where_inputs_are_taken_in_pairs(kernels):
    native, dtype = kernels
    weight, x = torch.randn(64, 63).to(dtype), torch.randn(3, 63).to(dtype)
    method = native.linear(weight)
    if product_library(dtype).packing_depth() == 2:
        assert method is None
    else:
        close(method.apply(x, None), F.linear(x, weight), dtype)


@pytest.mark.parametrize("size", [48, 768, 40])  # 40 is left to torch
def test_norms_are_torchs(kernels, size):
    native, dtype = kernels
    x, residual, weight = (torch.randn(30, size).to(dtype) for _ in range(3))
    weight = weight[0]
    close(native.rms_norm(x, weight, 1e-5), TorchKernels().rms_norm(x, weight, 1e-5), dtype)
    expected = residual.clone()
    normed = TorchKernels().add_rms_norm(expected, x, weight, 1e-5)
    close(native.add_rms_norm(residual, x, weight, 1e-5), normed, dtype)
    close(residual, expected, dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_heads_are_normed_and_rotated_as_by_torch(kernels, normed, rotated):
    native, dtype = kernels
    merged = torch.randn(40, 9, 64).to(dtype)
    norms = torch.randn(6, 64).to(dtype) if normed else None
    angles = torch.rand(40, 32) * 6
    table = torch.stack((angles.cos(), angles.sin()), 1)
    before, plain = merged.clone(), TorchKernels()
    wide = None if norms is None else norms.float()  # rounded once, as here: torch in bf16 rounds between the steps
    expected = plain.norm_rotate(before[:, :6].float(), wide, plain.rotation(table) if rotated else None, 1e-5)
    found = native.norm_rotate(merged[:, :6], norms, native.rotation(table) if rotated else None, 1e-5)
    close(found, expected, dtype)
    assert torch.equal(merged[:, 6:], before[:, 6:])


def test_heads_of_another_layout_or_dtype_are_refused(kernels):
    native, dtype = kernels
    for heads in (
        torch.randn(5, 64, 3).to(dtype).mT,
        torch.randn(5, 6, 64).to(dtype)[:, ::2],
        torch.randn(5, 3, 64).half(),
    ):
        with pytest.raises(ValueError, match="side by side"):
            native.norm_rotate(heads, None, None, 1e-5)
    if dtype is torch.float32:
        s = spec(dtype=dtype)
        with pytest.raises(ValueError, match="side by side"):
            Cache(NativeAttention.create(s)).run([(0, tokens(s, 5, 0).half())], [5], [0])


def test_another_cpu_is_another_library(monkeypatch):
    here = c_library._fingerprint([sys.executable], ())
    monkeypatch.setattr(c_library, "processor", lambda: ["flags: fpu avx2"])
    assert c_library._fingerprint([sys.executable], ()) != here


def test_a_cpu_that_this_one_is_not_is_refused_by_name(monkeypatch):
    monkeypatch.setenv(compiler.ISA_VARIABLE, "avx1024")
    with pytest.raises(ConfigError, match=r"SQUADRON_CPU_ISA=avx1024.*use native") as refused:
        compiler.chosen_isa()
    assert refused.value.flag == compiler.ISA_VARIABLE


@pytest.mark.parametrize("size", [32, 2048, 20])
def test_gates_are_torchs(kernels, size):
    native, dtype = kernels
    x = torch.randn(30, 2 * size).to(dtype) * 20
    x[0, :2] = torch.tensor([-200.0, 200.0])
    x[1, 0] = torch.nan
    found = native.silu_gate(x)
    close(found[2:], TorchKernels().silu_gate(x)[2:], dtype)
    close(found[0], TorchKernels().silu_gate(x)[0], dtype)
    assert found[1, 0].isnan()


def test_rows_have_the_same_bits_alone_and_together(kernels):
    native, dtype = kernels
    x, weight = torch.randn(700, 768).to(dtype), torch.randn(768).to(dtype)
    assert torch.equal(native.rms_norm(x, weight, 1e-5)[500:501], native.rms_norm(x[500:501], weight, 1e-5))
    assert torch.equal(native.silu_gate(x)[3:5], native.silu_gate(x[3:5]))


@needs_compiler
@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_gives_the_tokens_of_transformers(name, tmp_path):
    model = make(name, tmp_path)
    runner = ModelRunner(EngineConfig(str(tmp_path), num_kv_blocks=40, block_size=16, device="cpu"), SoloGroup())
    ragged = prompts(6, seed=2)
    check_against(model, Stepper(runner).generate(ragged, 6), ragged)


@needs_compiler
@pytest.mark.parametrize("name", ["qwen3", "stablelm", "stablelm_parallel", "cohere", "cohere2"])
def test_a_model_gives_the_same_logits_in_any_company_and_chunks(name, tmp_path):
    make(name, tmp_path)
    runner = ModelRunner(EngineConfig(str(tmp_path), num_kv_blocks=60, block_size=16, device="cpu"), SoloGroup())
    assert runner.attention_backend == "native"
    ragged = prompts(7, longest=60, seed=3)
    together = Stepper(runner).generate(ragged, 5)
    for sequence, prompt in zip(together, ragged, strict=True):
        alone = Stepper(runner).generate([prompt], 5)[0]
        assert alone.tokens == sequence.tokens
        assert torch.equal(torch.stack(alone.logits), torch.stack(sequence.logits))
        chunked, again = Stepper(runner), Sequence(list(prompt))
        while again.computed < len(prompt):
            chunked.step({0: min(11, len(prompt) - again.computed)}, [again])
        assert torch.equal(again.logits[0], sequence.logits[0])


def test_how_products_are_computed_is_logged(tmp_path, caplog):
    caplog.set_level("INFO")
    make("llama", tmp_path)
    ModelRunner(EngineConfig(str(tmp_path), num_kv_blocks=40, block_size=16, device="cpu"), SoloGroup())
    assert re.search(r"products: \d+ by (Native|Packed|Plain)Linear", caplog.text)
    assert re.search(r"kernels: (compiled for this CPU|torch's operations)", caplog.text)


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list a process's libraries")
def test_the_kernels_share_torchs_threads_instead_of_bringing_a_second_pool():
    program = (
        "import re, torch, pathlib\n"
        "from engine.kernels.native import native_library\n"
        "from engine.kernels.native_linear import product_library\n"
        "assert native_library(16, torch.float32) and product_library(torch.float32)\n"
        "torch.zeros(1 << 20).add_(1)\n"
        "print(*set(re.findall(r'/\\S*/lib[gi]?omp\\S*', pathlib.Path('/proc/self/maps').read_text())))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stdout.split()) == 1, f"OpenMP runtimes that compete for the cores: {done.stdout}"


@needs_compiler
def test_a_large_step_is_taken_in_parts_and_gives_the_same_logits(tmp_path, monkeypatch):
    make("llama", tmp_path)
    runner = ModelRunner(EngineConfig(str(tmp_path), num_kv_blocks=60, block_size=16, device="cpu"), SoloGroup())
    ragged = prompts(7, longest=60, seed=3)
    whole = Stepper(runner).generate(ragged, 3)
    monkeypatch.setattr("engine.worker.forward.PART_TOKENS", 50)
    parts = Stepper(runner).generate(ragged, 3)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))


@pytest.fixture
def no_cache(monkeypatch):
    monkeypatch.setattr(c_library, "cache_folder", lambda name: None)


def test_without_a_compiler_torch_serves(monkeypatch, caplog):
    monkeypatch.setattr(c_library.shutil, "which", lambda name: None)
    caplog.set_level("INFO")
    assert select_backend("auto", spec()).name == "reference"
    assert type(select_kernels(64, torch.float32, CPU)) is TorchKernels
    assert "no C compiler" in caplog.text
    with pytest.raises(ConfigError, match="cannot be compiled") as refused:
        select_backend("native", spec())
    assert refused.value.flag == "attention_backend"


def test_a_compiler_that_fails_is_quoted_and_torch_serves(monkeypatch, caplog, tmp_path, no_cache):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'libgomp is missing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(c_library.shutil, "which", lambda name: str(broken))
    assert select_backend("auto", spec()).name == "reference"
    assert "libgomp is missing" in caplog.text


@needs_compiler
def test_without_acache_folder_a_library_is_built_for_this_process_alone(no_cache):
    assert select_backend("auto", spec()).name == "native"


@needs_compiler
def test_a_library_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setattr(c_library, "cache_folder", lambda name: tmp_path)
    assert NativeAttention.create(spec()) is not None
    built = [(path.name, path.stat().st_mtime_ns) for path in tmp_path.iterdir()]
    assert NativeAttention.create(spec()) is not None
    assert [(path.name, path.stat().st_mtime_ns) for path in tmp_path.iterdir()] == built
    assert len(built) == 1


@needs_compiler
def test_a_library_that_does_not_load_is_built_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(c_library, "cache_folder", lambda name: tmp_path)
    monkeypatch.setattr(c_library, "_fingerprint", lambda *_: "named")
    library = tmp_path / "named.so"
    library.write_bytes(b"cut short")
    library.chmod(0o700)
    assert NativeAttention.create(spec(head_dim=16)) is not None
    assert library.stat().st_size > 10000


@needs_compiler
def test_a_library_that_others_could_have_written_is_not_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(c_library, "cache_folder", lambda name: tmp_path)
    assert NativeAttention.create(spec(head_dim=16)) is not None
    (library,) = tmp_path.iterdir()
    library.chmod(0o777)
    before = library.stat().st_ino
    assert NativeAttention.create(spec(head_dim=16)) is not None
    assert library.stat().st_ino != before
    assert library.stat().st_mode & 0o777 == 0o700


@needs_compiler
def test_the_library_that_is_loaded_is_the_one_that_was_looked_at(monkeypatch, tmp_path):
    """Between the look and the loading another takes its place, as whoever may write to a folder above could do."""
    monkeypatch.setattr(c_library, "cache_folder", lambda name: tmp_path)
    assert NativeAttention.create(spec(head_dim=16)) is not None
    (library,) = tmp_path.iterdir()
    load = c_library.ctypes.CDLL

    def put_another_there_and_load(name):
        library.unlink()
        library.write_bytes(b"another's")
        return load(name)

    monkeypatch.setattr(c_library.ctypes, "CDLL", put_another_there_and_load)
    assert NativeAttention.create(spec(head_dim=16)) is not None
    assert library.read_bytes() == b"another's", "what was loaded is what stands there, made anew"


@pytest.mark.parametrize("mode", [0o770, 0o777])
def test_acache_folder_that_others_can_write_to_is_not_used(monkeypatch, tmp_path, caplog, mode):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = c_library.cache_folder("kernels")
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(mode)
    assert c_library.cache_folder("kernels") is None
    assert "can be written by others" in caplog.text


@needs_compiler
def test_a_home_that_libraries_cannot_be_run_from_is_passed_over(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(c_library, "cache_folder", lambda name: tmp_path)
    load = c_library.ctypes.CDLL

    def refuse(path):
        if os.path.realpath(path).startswith(str(tmp_path)):
            raise OSError("failed to map segment: Operation not permitted")
        return load(path)

    monkeypatch.setattr(c_library.ctypes, "CDLL", refuse)
    assert NativeAttention.create(spec(head_dim=16)) is not None
    assert "Operation not permitted" in caplog.text


def fake_compiler(monkeypatch, tmp_path, lines):
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\n" + lines)
    fake.chmod(0o755)
    monkeypatch.setattr(c_library.shutil, "which", lambda name: str(fake))


def test_a_compiler_that_hangs_is_ended_with_all_it_started(monkeypatch, tmp_path, caplog, no_cache):
    held = tmp_path / "held"
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    fake_compiler(monkeypatch, tmp_path, f"sleep 1000 > {held} &\nwait\n")
    monkeypatch.setattr(c_library, "TIMEOUT", 1.0)
    assert compiler.load_library(SOURCES, {}) is None
    assert "timed out" in caplog.text
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # nobody is left who could write
    os.close(reader)


def test_complaints_in_any_encoding_are_quoted(monkeypatch, tmp_path, caplog, no_cache):
    fake_compiler(monkeypatch, tmp_path, "printf 'Datei fehlt f\\374r libgomp' >&2; exit 1\n")
    assert compiler.load_library(SOURCES, {}) is None
    assert "libgomp" in caplog.text


@needs_compiler
def test_processes_that_build_at_once_all_get_the_library_and_one_compiles_it(tmp_path):
    compiler, runs = tmp_path / "bin" / "gcc", tmp_path / "runs"
    compiler.parent.mkdir()
    real = next(filter(None, map(shutil.which, c_library.COMPILERS)))
    compiler.write_text(f'#!/bin/sh\necho run >> {runs}\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    program = (
        "from engine.kernels.native import SOURCES, load_library\n"
        "assert load_library(SOURCES, {'HEAD_DIM': 16, 'BLOCK': 16, 'BF16': 0, 'LATENT': 0}).best_rows() > 0"
    )
    path = f"{compiler.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": path}
    processes = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert runs.read_text().split() == ["run"]
    assert [path.suffix for path in (tmp_path / ".cache/squadron/kernels").iterdir()] == [".so"]


def test_which_kernels_serve_and_why_is_logged(caplog):
    caplog.set_level("INFO")
    select_kernels(64, torch.float16, CPU)
    assert "kernels: torch's operations; the compiled ones cannot be used" in caplog.text
    assert "not float16" in caplog.text


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"block_size": 8}, "block_size 8"),
        ({"head_dim": 24}, "head size 24"),
        ({"dtype": torch.float16}, "not float16"),
        ({"device": torch.device("cuda")}, "not for cuda"),
    ],
)
def test_what_cannot_be_compiled_is_told(values, reason):
    assert reason in why_not_native_attention(spec(**values))
    with pytest.raises(ConfigError, match=reason):
        select_backend("native", spec(**values))
