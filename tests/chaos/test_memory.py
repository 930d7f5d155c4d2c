"""Memory that runs out: in a step, in the KV cache, and a rank that the kernel ends for it (FAULTS 7, 8 and 31)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.errors import ApiError
from engine.device.gpu import as_step_memory_error
from engine.errors import StepMemoryError
from engine.report import SamplingInputs, StepInputs, StepOutputs
from engine.request import Request
from parallel.launcher import COUNTERS, MemoryDeaths, launch
from tests.chaos.hungry import take_all
from tests.chaos.lab import TIMES, NetLab, long_request
from tests.cluster.cluster_lab import GatedExecutor, Lab, LabReplica, oracle, until

REQUESTS = 32


class Cramped(GatedExecutor):
    """Has no memory for steps of more than `most` rows."""

    def __init__(self, num_blocks: int, most: int) -> None:
        super().__init__(num_blocks, pace=0.001)
        self.most = most
        self.failed = 0

    def execute(self, inputs: StepInputs, sampling: SamplingInputs) -> StepOutputs:
        if inputs.num_reqs > self.most:
            self.failed += 1
            raise StepMemoryError(f"no memory for {inputs.num_reqs} rows")
        return super().execute(inputs, sampling)


async def outcome(lab: Lab, request: Request) -> Any:
    """Return the tokens, or the code of the error."""
    try:
        return await lab.collect(request)
    except ApiError as error:
        assert (error.status, error.retryable) == (503, True)
        return error.code


async def test_a_step_without_memory_costs_the_newest_request_and_no_other_a_token() -> None:
    async with NetLab(max_num_seqs=REQUESTS) as lab:
        executor = Cramped(512, REQUESTS)
        replica = LabReplica("a", executor, 512, TIMES, max_num_seqs=REQUESTS)
        lab.alive["a"] = replica
        await lab.link(replica)
        requests = [long_request(f"r{i}", seed=i) for i in range(REQUESTS)]
        running = [asyncio.create_task(outcome(lab, request)) for request in requests]
        await until(lambda: lab.dispatcher.counters.tokens > 10 * REQUESTS)
        executor.most = REQUESTS - 3
        found = await asyncio.gather(*running)
        assert executor.failed == 3
        assert found[-3:] == ["out_of_memory"] * 3
        assert found[:-3] == [oracle(request) for request in requests[:-3]]
        assert lab.lost == [], "the engine died of it"
        await lab.quiet(replica)


async def test_a_request_that_no_memory_is_enough_for_leaves_an_engine_that_serves() -> None:
    async with NetLab() as lab:
        executor = Cramped(512, 0)
        replica = LabReplica("a", executor, 512, TIMES)
        lab.alive["a"] = replica
        await lab.link(replica)
        assert await outcome(lab, long_request("alone")) == "out_of_memory"
        executor.most = 8
        again = long_request("again")
        assert await outcome(lab, again) == oracle(again)
        await lab.quiet(replica)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_what_torch_says_of_memory_is_known_and_nothing_else_is_taken_for_it(raised: Exception, told: bool) -> None:
    with pytest.raises(StepMemoryError if told else RuntimeError), as_step_memory_error():
        raise raised


def test_an_allocation_that_the_system_refuses_is_known_as_such() -> None:
    with pytest.raises(StepMemoryError), as_step_memory_error():
        torch.empty(2**50, dtype=torch.uint8)


async def test_a_cache_of_the_longest_request_serves_two_hundred_with_a_kill_in_between() -> None:
    """Preempted, recomputed, moved to another replica as small: every one is exact and none waits for ever."""
    length, block = 60, 4
    async with NetLab(max_model_len=length, max_num_seqs=8) as lab:
        blocks = length // block + 1 + 1  # the longest request, one more, and the null block
        for name in "ab":
            await lab.start_remote(name, num_blocks=blocks)
        requests = [long_request(f"r{i}", seed=i % 7, tokens=10 + i % 38) for i in range(200)]
        running = [asyncio.create_task(lab.collect(request)) for request in requests]
        await until(lambda: lab.dispatcher.counters.tokens > 500, deadline=60)
        lab.kill("a")
        async with asyncio.timeout(120):
            assert await asyncio.gather(*running) == [oracle(request) for request in requests]
        assert lab.dispatcher.counters.migrations > 0
        await lab.quiet(lab.alive["b"])


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory control group of 64 MB, as a container has one; gone afterwards, also where it could not be set up."""
    name = f"squadron-test-{os.getpid()}"
    folder, file = Path("/sys/fs/cgroup/memory") / name, "memory.limit_in_bytes"
    if not folder.parent.is_dir():
        folder, file = Path("/sys/fs/cgroup") / name, "memory.max"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    try:
        limit_memory(folder / file)
        yield folder
    finally:
        folder.rmdir()


def limit_memory(file: Path) -> None:
    try:
        file.write_text(str(64 * 2**20), encoding="ascii")
    except OSError as error:
        pytest.skip(f"a memory control group can be made here and not limited: {error}")


@pytest.mark.skipif(not COUNTERS.exists(), reason="this kernel does not count its kills for lack of memory")
def test_a_rank_that_the_kernel_ends_for_lack_of_memory_is_reported_so(small_group: Path) -> None:
    with launch(2, take_all, (str(small_group),)) as gang:
        told = gang.wait_for_death(60)
    assert told is not None
    assert "was killed by SIGKILL; out of memory: the kernel has killed" in told


def test_a_kill_without_lack_of_memory_is_not_blamed_on_it(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("pgfault 9\noom_kill 3\n", encoding="ascii")
    deaths = MemoryDeaths(counters)
    assert deaths.suspicion() == ""
    counters.write_text("pgfault 9\noom_kill 5\n", encoding="ascii")
    assert "killed 2 processes" in deaths.suspicion()
    assert MemoryDeaths(tmp_path / "elsewhere").suspicion() == ""
