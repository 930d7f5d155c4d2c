"""A disk that is full, a clock that jumps, weights that rotted (FAULTS 35, 37 and 38)."""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.demo import demo_model_path
from engine.checksums import SUMS_FILE
from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.local_executor import prepare_model
from tests.chaos.lab import NetLab, long_request
from tests.unit.cluster_lab import oracle

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
WEIGHTS = "model.safetensors"
# Fills a disk of one megabyte, which is all that the process can write to, and generates.
ON_A_FULL_DISK = """
mount -t tmpfs -o size=1m tmpfs "$1" && cd "$1" && head -c 1m /dev/zero > full 2> /dev/null
export HOME="$1" TMPDIR="$1" XDG_CACHE_HOME="$1" PYTHONPATH="$2" PYTHONDONTWRITEBYTECODE=1
exec "$3" -c "$4"
"""
GENERATE = """
from deploy.demo import demo_model_path
from engine.llm import LLM
from engine.sampling_params import SamplingParams
with LLM(str(demo_model_path()), device="cpu", dtype="float32") as llm:
    (answer,) = llm.generate("def main():", SamplingParams(temperature=0.0, max_tokens=12))
    print("said", list(answer.outputs[0].token_ids))
"""


def mounts_missing() -> str:
    """Return why a disk of one's own cannot be mounted here, "" where it can."""
    if shutil.which("unshare") is None:
        return "no unshare command"
    mount = ("sh", "-c", "mount -t tmpfs tmpfs /mnt")
    return subprocess.run([*NAMESPACE, *mount], capture_output=True, text=True, check=False).stderr.strip()


@pytest.mark.skipif(bool(mounts_missing()), reason=f"no mount namespace: {mounts_missing()}")
def test_a_full_disk_keeps_no_model_from_being_served(tmp_path: Path) -> None:
    arguments = ("sh", str(tmp_path), str(ROOT), sys.executable, GENERATE)
    commands = ([sys.executable, "-c", GENERATE], [*NAMESPACE, "sh", "-c", ON_A_FULL_DISK, *arguments])
    runs = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    (usual, _), (full, complaints) = (run.communicate(timeout=150) for run in runs)
    assert [run.returncode for run in runs] == [0, 0], complaints[-3000:]
    assert full == usual
    assert full.startswith("said [")


async def test_a_wall_clock_that_jumps_ends_nothing_and_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(37)
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + rng.uniform(-1e6, 1e6))
    async with NetLab() as lab:
        replicas = [await lab.start_remote(name, pace=0.002) for name in "ab"]
        requests = [long_request(f"r{i}", seed=i) for i in range(16)]
        began = time.monotonic()
        found = await asyncio.gather(*(lab.collect(request) for request in requests))
        assert found == [oracle(request) for request in requests]
        assert time.monotonic() - began < 30.0
        assert lab.lost == []
        await lab.quiet(*replicas)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the built-in model with the sums of its files."""
    folder = tmp_path / "model"
    shutil.copytree(demo_model_path(), folder)
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    (folder / SUMS_FILE).write_text(f"{digest}  {WEIGHTS}\n", encoding="utf-8")
    return folder


def config(folder: Path) -> EngineConfig:
    return EngineConfig(str(folder), device="cpu")


def test_a_flipped_bit_is_refused_by_name_where_sums_are_given(copy: Path) -> None:
    prepare_model(config(copy))
    weights = bytearray((copy / WEIGHTS).read_bytes())
    weights[len(weights) // 2] ^= 1
    (copy / WEIGHTS).write_bytes(weights)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged: its SHA-256"):
        prepare_model(config(copy))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("0" * 64 + "  other.safetensors", r"other\.safetensors is missing"),
        ("0" * 64 + "  ../elsewhere", "two spaces and the name of a file beside it"),
        ("not a sum", "two spaces and the name of a file beside it"),
    ],
)
def test_sums_that_cannot_be_checked_are_refused_by_line(copy: Path, line: str, told: str) -> None:
    (copy / SUMS_FILE).write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=told):
        prepare_model(config(copy))
