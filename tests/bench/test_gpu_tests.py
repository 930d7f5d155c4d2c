"""What `pytest tests/gpu` promises of every test: its memory comes back, it ends in time, its outcome is on disk."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.bench.gpu import part_checks
from tests.bench.gpu.bench import Bench, OutOfTime
from tests.bench.gpu.results import Results
from tests.bench.gpu.scale import TINY
from tests.gpu.outcomes import read

ROOT = Path(__file__).parents[2]
# A GPU of which torch counts what is held in `HELD`.
PLAYED = """
import weakref
import torch

class Tensor:
    def __init__(self, size):
        HELD[id(self)] = size << 20
        weakref.finalize(self, HELD.pop, id(self))

HELD = {}
torch.cuda.is_available = lambda: True
torch.cuda.get_device_name = lambda device: "a GPU that is not there"
torch.cuda.empty_cache = torch._C._cuda_clearCublasWorkspaces = lambda: None
torch.cuda.memory_allocated = lambda device: sum(HELD.values())
"""


@pytest.fixture
def run(tmp_path):
    def run(text, *arguments):
        (tmp_path / "conftest.py").write_text(PLAYED)
        (tmp_path / "test_it.py").write_text(f"import pytest, time\nfrom conftest import Tensor\n{text}")
        command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.conftest", "-p", "no:cacheprovider", "-v"]
        (tmp_path / "pytest.ini").write_text((ROOT / "tests/gpu/pytest.ini").read_text())
        command += [str(tmp_path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)

    return run


def test_a_test_that_holds_memory_fails_and_one_that_failed_holds_none(run):
    told = run("""
kept = []

@pytest.fixture(scope="module")
def model():
    yield Tensor(5000)

def test_failing():
    model = Tensor(1000)
    assert model is None

def test_holding():
    kept.append(Tensor(300))

def test_of_a_fixture(model):
    Tensor(4000)

def test_little():
    kept.append(Tensor(100))
""")
    assert told.returncode == 1
    lines = told.stdout.splitlines()
    assert "=== 1 failed, 3 passed, 2 errors" in lines[-1], told.stdout
    short = [line for line in lines if line.startswith(("FAILED", "ERROR ")) and "::" in line]
    assert [line.partition(" - ")[0].rpartition("::")[2] for line in short] == [
        "test_holding",
        "test_little",
        "test_failing",
    ]
    held = [line for line in lines if line.startswith("holds ")]
    assert held == [
        "holds 300 MiB of the GPU that are not given back, at most 256",
        "holds 400 MiB of the GPU that are not given back, at most 64",
    ]


SLOW = """
def test_first():
    pass

@pytest.mark.limit(1)
def test_hanging():
    while True:
        time.sleep(0.01)

@pytest.mark.skip("nothing to do")
def test_last():
    pass

def test_wrong():
    assert 1 == 2, "so it is\\nand more"
"""


def test_a_test_that_hangs_ends_the_run_with_its_stack_and_the_next_run_goes_on_behind_it(run, tmp_path):
    file = tmp_path / "outcomes.jsonl"
    told = run(SLOW, "--outcomes", str(file))
    assert told.returncode == 1
    assert "Timeout (0:00:01)!" in told.stderr and "in test_hanging" in told.stderr
    found = {name.partition("::")[2]: one for name, one in read(file).items()}
    assert {name: one.outcome for name, one in found.items()} == {"test_first": "passed", "test_hanging": "began"}
    with file.open("a") as cut:
        cut.write('{"test": "test_it.py::test_l')
    file.write_text(file.read_text() + "\n")
    told = run(SLOW, "--outcomes", str(file))
    assert "test_first" not in told.stdout and "1 deselected" in told.stdout
    assert "Timeout (0:00:01)!" in told.stderr, "what did not end is tried again, after the others"
    found = {name.partition("::")[2]: one for name, one in read(file).items()}
    assert {name: one.outcome for name, one in found.items()} == {
        "test_first": "passed", "test_hanging": "began", "test_last": "skipped", "test_wrong": "failed",
    }  # fmt: skip
    assert found["test_last"].reason == "nothing to do"
    assert found["test_wrong"].reason == "AssertionError: so it is"


def test_the_plan_is_checked_last_as_it_takes_nearly_all_memory():
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    names = [line for line in told.stdout.splitlines() if "::" in line]
    assert len(names) > 300
    assert [name for name in names if name.startswith("test_footprint.py")] == names[-1:]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder of tests of a GPU that is played, and what a part of the bench makes of them."""
    folder = tmp_path / "gpu"
    folder.mkdir()
    (folder / "conftest.py").write_text(f'{PLAYED}\npytest_plugins = ["tests.gpu.conftest"]\n')
    (folder / "pytest.ini").write_text((ROOT / "tests/gpu/pytest.ini").read_text())
    monkeypatch.setattr(part_checks, "FOLDER", folder)
    monkeypatch.chdir(ROOT)
    bench = Bench(Results(tmp_path / "r.json"), TINY, torch.device("cuda:0"), tmp_path)

    def run(**texts):
        for name, text in texts.items():
            (folder / f"test_{name}.py").write_text(f"import os, pytest, time\n{text}")
        part = part_checks._part("checks", "Checks", list(texts), 2)
        bench.run(part)
        return {name.partition("/")[2]: row for name, row in bench.results.rows.items()}

    return run, bench


@pytest.mark.timeout(300)
def test_checks_are_rows_whatever_becomes_of_a_test(files):
    run, _ = files
    rows = run(
        good="def test_one(): pass\ndef test_two(): pass",
        bad=f"{SLOW}\ndef test_killed(): os.kill(os.getpid(), 9)\ndef test_behind(): pass",
        absent="@pytest.mark.skip('needs 2 GPUs')\ndef test_one(): pass",
        broken="import nothing_of_that_name",
    )
    assert (rows["good"].value, rows["good"].error) == (2, "")
    assert rows["bad"].error == (
        "ChecksFailed: 3 of 6: test_hanging: ended its process; test_wrong: AssertionError: so it is; "
        "test_killed: ended its process"
    )
    assert rows["absent"].skipped == "needs 2 GPUs"
    assert rows["broken"].error == "ChecksFailed: pytest ended with code 2 for test_broken.py"


def cut_when(reached):
    """Play `subprocess.run` with a time that is over once something is reached."""

    def run(command, timeout, check):
        process = subprocess.Popen(command)
        while not reached():
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
        process.wait()
        raise subprocess.TimeoutExpired(command, timeout)

    return run


@pytest.mark.timeout(300)
def test_checks_that_are_cut_off_go_on_behind_what_passed(files, monkeypatch):
    run, bench = files
    text = "def test_one(): pass\ndef test_two():\n    while not os.path.exists('{0}'): time.sleep(0.1)"
    admission = bench.results.path.with_name("gate")
    outcomes = bench.results.path.with_name("r.checks.jsonl")
    with monkeypatch.context() as patch, pytest.raises(OutOfTime):
        patch.setattr(part_checks.subprocess, "run", cut_when(lambda: len(read(outcomes)) == 2))
        run(slow=text.format(admission))
    assert [one.outcome for one in read(outcomes).values()] == ["passed", "began"]
    assert not bench.results.rows
    admission.touch()
    assert run(slow=text.format(admission))["slow"].value == 2
    assert outcomes.read_text().count("test_one") == 2, "begun once, ended once"
    bench.again = True
    assert run(slow=text.format(admission))["slow"].value == 2
    assert outcomes.read_text().count("test_one") == 2, "run again from the start"
