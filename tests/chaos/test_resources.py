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
from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.loader.checkpoint import SUMS_FILE, check_sums
from engine.worker.executor_start import CHECKSUMS, build_executor, prepare_model
from tests.chaos.lab import NetLab, long_request
from tests.cluster.cluster_lab import oracle

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
def test_a_full_disk_keeps_no_engine_from_generating(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", [WEIGHTS, f"./{WEIGHTS}", "config.json"])
@pytest.mark.parametrize("mark", [" ", "*"])
def test_a_file_that_its_sum_contradicts_is_refused_however_the_line_is_written(
    copy: Path, name: str, mark: str
) -> None:
    (copy / SUMS_FILE).write_text(f"{'0' * 64} {mark}{name}\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"{name.removeprefix('./')}: damaged: its SHA-256"):
        prepare_model(config(copy))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "onnx/model.onnx", "tf_model.h5", "README.md", "added_tokens.json", "../elsewhere"]
)
def test_sums_of_what_is_not_read_or_was_never_fetched_say_nothing(copy: Path, name: str) -> None:
    (copy / "README.md").write_text("edited", encoding="utf-8")
    (copy.parent / "elsewhere").write_text("none of ours", encoding="utf-8")
    with (copy / SUMS_FILE).open("a", encoding="utf-8") as file:
        file.write(f"{'0' * 64}  {name}\n")
    folder, _ = prepare_model(config(copy))
    assert list(folder.phases) == [CHECKSUMS], "the other sums were checked"


def test_a_weight_file_that_has_a_sum_and_is_missing_is_named(copy: Path) -> None:
    with pytest.raises(CheckpointError, match=r"weight file model-2\.safetensors is missing"):
        check_sums(copy, {"model-2.safetensors": "0" * 64})


@pytest.mark.parametrize("content", [b"not a sum\n", b"0" * 63 + b"  model.safetensors\n", b"\xff\xfe\n"])
def test_a_list_of_sums_that_is_none_is_refused(copy: Path, content: bytes) -> None:
    (copy / SUMS_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=SUMS_FILE):
        prepare_model(config(copy))


def test_checking_sums_is_a_phase_of_the_start(copy: Path) -> None:
    told: list[str] = []

    def note(phase: str, _share: float | None = None) -> None:
        if phase not in told:
            told.append(phase)

    executor, info = build_executor(config(copy), note)
    executor.close()
    assert told[:2] == ["checksums", "weights"]
    assert info.phases["checksums"] > 0
    (copy / SUMS_FILE).unlink()
    told.clear()
    folder, _ = prepare_model(config(copy), note)
    assert (told, folder.phases) == ([], {})
