"""Processes of one machine share out its cores, and one that is killed leaves its own to the others."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from engine.device import core_claims
from engine.device.core_claims import CoreRegistry, UnclaimedError
from engine.device.topology import format_cpus
from tests.engine.device.machines import machine

CLAIM = """
import sys
from pathlib import Path
from engine.device.core_claims import CoreRegistry
claims, system, threads = sys.argv[1:]
claim = CoreRegistry(frozenset(range(128)), Path(claims), Path(system)).claim(int(threads))
print(claim, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Where claims are kept, and a machine of two sockets with 32 cores of two hardware threads each."""
    return tmp_path / "claims", machine(tmp_path / "system", sockets=2, cores=32, smt=2)


def registry(places: tuple[Path, Path]) -> CoreRegistry:
    return CoreRegistry(frozenset(range(128)), *places)


def claiming(places: tuple[Path, Path], threads: int) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM, *map(str, places), str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().strip()


def test_two_processes_have_no_core_in_common_and_a_killed_one_leaves_its_own(places):
    first, its = claiming(places, 32)
    second, other = claiming(places, 32)
    try:
        assert (its, other) == ("CPUs 0-31 of NUMA node 0", "CPUs 32-63 of NUMA node 1")
        with pytest.raises(
            UnclaimedError, match="1 of 64 cores are wanted, and other processes have claimed too many"
        ):
            registry(places).claim(1)
        first.kill()
        first.wait()
        claim = registry(places).claim(32)
        assert format_cpus(claim.cpus) == "0-31"
        claim.release()
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def test_claims_of_one_process_are_apart_until_they_are_released(places):
    claims = [registry(places).claim(8) for _ in range(8)]
    assert len(frozenset().union(*(claim.cpus for claim in claims))) == 64
    assert all(len(claim.nodes) == 1 for claim in claims)
    claims[3].release()
    claims[3].release()
    again = registry(places).claim(8)
    assert again.cpus == claims[3].cpus
    for claim in (*claims, again):
        claim.release()


def test_a_group_is_taken_whole_or_not_at_all(places):
    groups = ((0, 1), (2, 3))
    first, second = registry(places).claim_group(groups), registry(places).claim_group(groups)
    assert (first.cpus, second.cpus) == ({0, 1}, {2, 3})
    with pytest.raises(UnclaimedError, match="cores of every group"):
        registry(places).claim_group(groups)
    with pytest.raises(UnclaimedError, match="cores of every group"):
        registry(places).claim_group([(3, 4)])
    third = registry(places).claim_group([(4, 68, 40)])
    assert str(third) == "CPUs 4,40,68 of NUMA nodes 0-1"
    for claim in (first, second, third):
        claim.release()


def test_a_process_that_stands_still_while_it_claims_holds_nobody_up(places, monkeypatch):
    registry(places).claim(1).release()
    monkeypatch.setattr(core_claims, "LOCK_TIMEOUT", 0.0)
    with (places[0] / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UnclaimedError, match="held by another process"):
            registry(places).claim(1)


def test_a_folder_of_others_is_not_trusted(places):
    places[0].mkdir(mode=0o777)
    places[0].chmod(0o777)
    with pytest.raises(UnclaimedError, match="can be written by others"):
        registry(places).claim(1)
    with pytest.raises(UnclaimedError, match="cannot be kept"):
        CoreRegistry(frozenset({0}), Path("/proc/nowhere/claims"), places[1]).claim(1)
