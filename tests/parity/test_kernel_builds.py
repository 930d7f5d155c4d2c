"""What compilers make of the kernels: the same bits by each of them and for any CPU's tuning, or it is not used."""

import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.native import NativeAttention
from engine.attention.select import select_backend
from engine.kernels import compiler
from engine.kernels.attend import PROVED, ProvedSequence
from engine.kernels.base import TorchKernels
from engine.kernels.native import NativeKernels, native_library
from engine.kernels.native_linear import kinds, product_library
from engine.kernels.native_sampler import NativeDraws, draw_library
from engine.kernels.recurrent import StateRows
from engine.kernels.select import select_kernels
from engine.sampling.sampler import sample
from parallel import c_library
from tests.long import long
from tests.parity.stepping import sampling
from tests.parity.test_native_attention import CPU, DTYPES, Cache, needs_compiler, spec, tokens

TUNINGS = ("generic", "znver3", "haswell", "skylake-avx512", "icelake-server")
OMP = "static inline int omp_get_thread_num(void) { return 0; }\n"  # clang comes without a runtime


def build_with(monkeypatch, tmp_path, name, tuning, isa):
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    (tmp_path / "omp.h").write_text(OMP)
    (tuned,) = (flag for flag in compiler.FLAGS if flag.startswith("-mtune"))
    left_out = {tuned, "-fopenmp"} if name == "clang" else {tuned}
    flags = [flag for flag in compiler.FLAGS if flag not in left_out]
    stub = [f"-I{tmp_path}"] if name == "clang" else []
    monkeypatch.setattr(c_library, "COMPILERS", (name,))
    monkeypatch.setattr(compiler, "FLAGS", (*flags, *stub, f"-mtune={tuning}"))
    monkeypatch.setenv(compiler.ISA_VARIABLE, isa)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def attended(dtype) -> Iterator[Tensor]:
    for heads, window, softcap in ((2, 0, 0.0), (6, 20, 5.0)):
        s = spec(dtype=dtype, head_dim=64, num_heads=heads, num_kv_heads=2, softcap=softcap)
        cache = Cache(NativeAttention.create(s))
        sequences = [(row, tokens(s, 80, row)) for row in range(4)]
        yield from cache.run(sequences, [7, 80, 33, 80], [0] * 4, window)
    library = native_library(80, dtype, 16, 64)
    yield ProvedSequence(library, 80, dtype, 16, 64).attend(PROVED, True)


def by_rows(dtype) -> Iterator[Tensor]:
    kernels = NativeKernels(native_library(64, dtype), None, dtype, 1)
    x, heads, angles = random(9, 256).to(dtype), random(9, 4, 64).to(dtype), random(9, 32)
    yield kernels.rms_norm(x, x[0].contiguous(), 1e-5)
    yield kernels.silu_gate(x * 9)
    yield kernels.gelu_gate(x * 9)
    rotation = kernels.rotation(torch.stack((angles.cos(), angles.sin()), 1))
    yield kernels.norm_rotate(heads.clone(), heads[0].contiguous(), rotation, 1e-5)
    rows = StateRows(*(torch.tensor(each, dtype=torch.int32) for each in ([0, 9], [-1], [0])))
    yield kernels.short_conv(x, random(4, 256), None, torch.zeros(1, 3, 256), rows, True)
    unit = kernels.unit_heads(heads, 1e-5, 1.0)
    yield unit
    state = torch.zeros(1, 4, 64, 64)
    gain = angles[:, :4].sigmoid().contiguous()
    yield kernels.outer_product_state(unit, unit, heads, gain, gain, state, rows, True)
    yield state


def multiplied(dtype) -> Iterator[Tensor]:
    library = product_library(dtype)
    for ins in (2112, 80):
        for method in kinds(library, ins, dtype, torch.Generator().manual_seed(1)):
            for rows in (1, 5, 40):
                yield method.apply(random(rows, ins).to(dtype), random(70).to(dtype))


def drawn(dtype) -> Iterator[Tensor]:
    draws = NativeDraws(draw_library(), 1)
    logits = (4 * random(6, 9000)).to(dtype)
    inputs = sampling(
        6, temperature=[0.7] * 6, top_k=[0, 50, 0, 0, 20, 0], top_p=[1, 1, 0.9, 1, 0.8, 0.99], seeds=np.arange(6),
        min_p=[0, 0, 0, 0.1, 0, 0],
    )  # fmt: skip
    yield sample(logits, inputs, draws).token_ids
    yield from draws.score(logits, torch.arange(6), 20, True)


@needs_compiler
@pytest.mark.parametrize("isa", [*compiler.isas()[:1], *map(long, compiler.isas()[1:])])
@pytest.mark.parametrize(
    ("name", "tuning", "dtype", "whats"),
    [
        ("gcc", "znver3", torch.float32, (attended, by_rows)),
        ("clang", "generic", torch.float32, (by_rows, drawn)),
        *(
            long(name, tuning, dtype, (attended, by_rows, multiplied, drawn))
            for name in ("gcc", "clang")
            for tuning in TUNINGS
            for dtype in DTYPES
        ),
    ],
)
def test_any_compiler_and_tuning_makes_the_same_bits(monkeypatch, tmp_path, name, tuning, dtype, whats, isa):
    found = []
    for made in (("gcc", "generic"), (name, tuning)):
        build_with(monkeypatch, tmp_path, *made, isa)
        found.append([each for what in whats for each in what(dtype)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@needs_compiler
@pytest.mark.parametrize(
    ("file", "sum_of", "make"),
    [
        ("rows.h", "sum[r][s]", lambda: native_library(32, torch.float32)),
        long("panel_rows.h", "sum[r][v]", lambda: product_library(torch.float32)),
    ],
)
def test_a_library_whose_rows_round_by_company_is_told_of_and_not_used(
    monkeypatch, tmp_path, caplog, file, sum_of, make
):
    folder, kept = tmp_path / "kernels", tmp_path / "kept"
    shutil.copytree(compiler.FOLDER, folder)
    kept.mkdir(0o700)
    text = (folder / file).read_text()
    (folder / file).write_text(text.replace(f"{sum_of} = ", f"{sum_of} = rows > 1 ? {sum_of} * 0.9999999f : "))
    monkeypatch.setattr(compiler, "FOLDER", folder)
    monkeypatch.setattr(c_library, "cache_folder", lambda name: kept)
    seen = []
    for _ in range(2):
        caplog.clear()
        assert make() is None
        assert "other bits among others than alone" in caplog.text
        seen.append([(path.suffix, path.stat().st_mtime_ns) for path in kept.iterdir()])
    assert [suffix for suffix, _ in seen[0]] == [".refused"]
    assert seen[1] == seen[0], "it was made again"
    assert type(select_kernels(32, torch.float32, CPU)) is TorchKernels
    assert file == "panel_rows.h" or select_backend("auto", spec()).name == "reference"
