"""Ranks that are out of step or cut off from each other end their group, in time and by name (FAULTS 6 and 19)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from deploy.demo import demo_model_path
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineDeadError
from engine.inputs.step_messages import StepWriter
from engine.report import StepInputs
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.worker.executor_start import build_executor
from parallel.channel import Buffer
from parallel.errors import ChannelError
from tests.parallel.parallel_ranks import crew

ROOT = Path(__file__).resolve().parents[2]
STEP_TIMEOUT = 20.0  # seconds: what is noticed at once must not need them
NAMESPACE = ("unshare", "--user", "--map-root-user", "--net")


def namespaces_missing() -> str:
    """Return why network namespaces cannot be used here, "" where they can."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "no unshare or ip command"
    tried = subprocess.run([*NAMESPACE, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False)
    return tried.stderr.strip()


def test_a_collective_that_does_not_match_is_told_and_never_summed() -> None:
    """Rank 1 waits to be told what to run: what rank 0 begins on its own meets the next collective of rank 1."""
    with pytest.raises(ChannelError, match="another collective"), crew(2) as ranks:
        ranks.ring.send(b"tests.chaos.mismatch:sums_of_eight", STEP_TIMEOUT)
        ranks.group.all_reduce(torch.ones(4))


def test_a_rank_that_was_told_another_step_ends_its_group_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(str(demo_model_path()), device="cpu", tensor_parallel_size=2, step_timeout=STEP_TIMEOUT)
    executor, info = build_executor(config)
    core = EngineCore(info.config, executor, info.eos_token_ids, info.vocab_size, info.num_kv_blocks)
    for number in range(3):
        core.add(Request(f"r{number}", (5, 6, 7), SamplingParams(max_tokens=50, ignore_eos=True)))
    first = core.step()
    assert len(first.token_ids) == 3
    ranks = [psutil.Process(pid) for pid in executor._workers.pids]
    truly = StepWriter.pack

    def another_step(steps: StepWriter, inputs: StepInputs, number: int) -> Buffer:
        shorter = StepInputs(**{name: getattr(inputs, name) for name in StepInputs.__slots__})
        for name in (
            "input_ids",
            "positions",
            "slot_mapping",
            "seq_lens",
            "num_computed_tokens",
            "block_tables",
            "logits_indices",
            "slots",
        ):
            setattr(shorter, name, getattr(inputs, name)[:2])
        shorter.query_start_loc = inputs.query_start_loc[:3]
        return truly(steps, shorter, number)

    monkeypatch.setattr(StepWriter, "pack", another_step)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="another collective"):
        core.step()
    assert time.monotonic() - began < STEP_TIMEOUT
    _, left = psutil.wait_procs(ranks, timeout=5)
    assert not left, "a rank outlives its group"


@pytest.mark.skipif(bool(namespaces_missing()), reason=f"no network namespace: {namespaces_missing()}")
def test_ranks_whose_network_is_gone_end_by_the_step_deadline() -> None:
    run = subprocess.run(
        [*NAMESPACE, sys.executable, "-m", "tests.chaos.apart"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = re.search(r"dead after ([\d.]+) s: (.*)", run.stdout)
    assert found, run.stdout
    assert float(found[1]) < 10.0, "the deadline of 2 s was missed by far"
    assert "0 ranks left" in run.stdout
