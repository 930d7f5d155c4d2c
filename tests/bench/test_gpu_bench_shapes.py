"""The bench on CUDA, as far as shapes go: what it gives the device fits, and every figure comes out with a value."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.llm import LLM
from tests.bench.gpu import part_decode, part_prefill, part_skew, timing
from tests.bench.gpu import session as driving
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.catalogue import catalogue
from tests.bench.gpu.checkpoints import checkpoint
from tests.bench.gpu.profiled import Profiled
from tests.bench.gpu.results import Results
from tests.bench.gpu.scale import TINY
from tests.cuda_shapes import cuda_in_shapes, why_no_shapes

pytestmark = pytest.mark.skipif(why_no_shapes() is not None, reason=str(why_no_shapes()))

SCALE = replace(TINY, backends=("triton", "flash", "torch_varlen"), batches=(1, 8))
# Others need contents: the parity of logits, transformers, and processes that really start.
PARTS = ("limits", "load-qwen3-0.6b", "decode-qwen3-0.6b", "prefill", "attention", "products", "kernels")
PARTS += ("skew", "tuning")
NOT_INSTALLED = ("flash", "torch_varlen")
WAITS = "kernels/draw-top"  # torch's own filters, which look at the device while they draw


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of all parts, by name; a call takes a second."""
    folder = tmp_path_factory.mktemp("models")
    for shape in SCALE.shapes:
        checkpoint(shape, folder, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch, cuda_in_shapes():
        patch.setattr(timing, "_by_events", lambda run, lead: (run(), 1.0)[1])
        patch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
        patch.setattr(torch, "compile", lambda operation, **_: operation)
        # How much the cache may take is read from a tensor, and these have no contents.
        patch.setattr(driving, "LLM", partial(LLM, num_kv_blocks=400))
        found = Profiled(1e-6, (("attend", 0.75),))
        for part in (part_decode, part_prefill, part_skew):
            patch.setattr(part, "profiled", lambda device, run, steps: (run(), found)[1])
        bench = Bench(Results(folder / "r.json"), SCALE, torch.device("cuda:0"), folder)
        for part in catalogue(SCALE):
            if part.name.startswith(PARTS):
                bench.run(part)
    return bench.results.rows


def test_nothing_fails(rows):
    failed = {row.name: row.error for row in rows.values() if row.error}
    assert all(name.startswith(WAITS) and "/torch/" in name for name in failed), failed


def test_what_needs_a_gpu_is_measured_there(rows):
    skipped = {row.name: row.skipped for row in rows.values() if row.skipped}
    assert all(any(name in row for name in NOT_INSTALLED) for row in skipped), skipped
    assert {"limits/fp8", "limits/pinned", "products/fp8/8", "products/int8/8"} <= rows.keys() - skipped.keys()
    assert {"decode-qwen3-0.6b/8/hidden", "kernels/draw-top-k-and-p/triton/8"} <= rows.keys() - skipped.keys()
    assert "attention/triton/3x48/page-16-fp8" not in skipped


def test_the_kernels_that_take_most_are_named(rows):
    for name in ("decode-qwen3-0.6b/8/device", "prefill-qwen3-8b/fresh", "skew-qwen3-8b/skewed"):
        assert rows[name].note == "of the device's time: attend 75.0 %", name


def test_twelve_tiles_are_tried_and_the_fastest_is_told_as_a_row_for_the_table(rows):
    tried = [name for name in rows if name.startswith(("tuning/decode", "tuning/prefill"))]
    assert len(tried) == 12
    assert all(rows[name].value > 0 for name in tried)
    assert rows["tuning/gain"].note.startswith("`Shape(gpu='a GPU that is not there', head_dim=16, group=2,")
    assert "Tuning(decode=Tile(" in rows["tuning/gain"].note


def test_a_step_is_timed_with_a_long_sequence_among_the_short_ones_and_without(rows):
    assert rows["skew-qwen3-8b/even"].value > 0 and rows["skew-qwen3-8b/skewed"].value > 0
    whole = rows["skew-qwen3-8b/skewed"].value / rows["skew-qwen3-8b/even"].value
    assert rows["skew-qwen3-8b/ratio"].value == pytest.approx(whole)
    assert rows["skew-qwen3-8b/ratio"].limit > 1


def test_shares_come_from_the_time_of_a_call(rows):
    # Two products of 64 x 64 in turn, which take a second together.
    assert rows["limits/bf16"].value == pytest.approx(2 * 64**3 / 0.5 / 1e12)
    read = rows["attention/triton/3x48/page-16"].value
    assert rows["attention/triton/3x48/page-16-fp8"].value == pytest.approx(read / 2, rel=0.5)
