"""The two commands of a bare GPU machine run here too, with nothing but what such a machine has."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys

import pytest
import torch

from tests.bare_machine import INSTALLED, absent_modules, required
from tests.bench.gpu import __main__ as command
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.catalogue import catalogue
from tests.bench.gpu.results import Results
from tests.bench.gpu.scale import TINY

NEEDS_CUDA = "needs a CUDA device"


def bare(*arguments):
    """Run `python -m` on what looks like a bare machine, one core of it."""
    command = [sys.executable, "-m", "tests.bare_machine", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(command, capture_output=True, text=True, timeout=550, env=environment)


def test_a_bare_machine_has_none_of_what_only_this_one_needs():
    absent = absent_modules(required(INSTALLED))
    assert {"ray", "fastapi", "grpc", "msgspec", "hypothesis", "pytest_timeout", "psutil", "pydantic"} <= absent
    assert not absent & {"torch", "transformers", "safetensors", "tokenizers", "numpy", "pytest", "engine", "tests"}


def test_the_tests_of_a_gpu_are_collected_and_say_why_they_are_skipped():
    run = bare("pytest", "tests/gpu", "-p", "no:cacheprovider")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "configfile: pytest.ini" in run.stdout
    assert "torch sees no CUDA device here" in run.stdout
    assert "failed" not in run.stdout and "error" not in run.stdout.lower()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_figure_is_measured_or_says_what_it_lacks(tmp_path):
    results = tmp_path / "r.json"
    asked = ("--device", "cpu", "--shapes", "tiny", "--results", results, "--models", tmp_path)
    run = bare("tests.bench.gpu", *asked)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    rows = Results(results).rows
    figures = [figure for part in catalogue(TINY) for figure in part.figures]
    assert list(rows) == sorted(rows, key=list(rows).index) and rows.keys() == {figure.name for figure in figures}
    for row in rows.values():
        assert row.value is None or (math.isfinite(row.value) and row.value >= 0), row
        assert (row.value is None) == bool(row.skipped) and not row.error, row
    # What a CPU can run it has run; a GPU alone can be asked how idle it was.
    ran = ("limits/copy", "parity-qwen3-8b/bfloat16/max_abs", "load-qwen3-0.6b/tokens_per_s", "prefill-qwen3-8b/long")
    more = ("transformers-qwen3-0.6b/tokens_per_s", "start-qwen3-8b/first_token", "attention/reference/3x48/page-64")
    assert all(rows[name].value is not None for name in ran + more)
    assert rows["decode-qwen3-0.6b/3/idle"].skipped == NEEDS_CUDA
    assert rows["parity-qwen3-0.6b/float32/max_abs"].value < 1e-3
    assert rows["parity-qwen3-0.6b/float32/agree_clear"].value == 100

    table = bare("tests.bench.gpu", "--shapes", "tiny", "--table", results)
    assert table.returncode == 0, table.stderr
    assert all(figure.what in table.stdout for figure in figures)


def test_a_part_has_a_process_of_its_own_that_writes_the_same_file(tmp_path):
    (back := tmp_path / "back").mkdir()
    bench = Bench(Results(tmp_path / "r.json", back), TINY, torch.device("cpu"), tmp_path)
    limits = next(part for part in catalogue(TINY) if part.name == "limits")
    command.run_apart(limits, bench, argparse.Namespace(minutes=5, also=back))
    rows = bench.results.rows
    assert rows.keys() == {figure.name for figure in limits.figures}
    assert rows["limits/copy"].value > 0 and rows["limits/pinned"].skipped == NEEDS_CUDA
    assert (back / "r.json").read_text() == bench.results.path.read_text(), "a copy at every change"
    assert Results(bench.results.path).runs[rows["limits/copy"].run]["device"] == "cpu"
