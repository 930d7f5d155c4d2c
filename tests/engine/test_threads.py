"""Ranks compute on cores of their own, and what was found before is there again after them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine import threads
from engine.config import EngineConfig
from engine.device.core_claims import CoreRegistry
from engine.device.topology import allowed_cpus
from engine.errors import ConfigError
from engine.threads import ThreadShare
from tests.engine.device.machines import machine

pytestmark = pytest.mark.skipif(not allowed_cpus(), reason="this system binds no threads")
FIRST = min(allowed_cpus(), default=0)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


@pytest.fixture
def claims(tmp_path: Path) -> Path:
    return tmp_path / "claims"


def config(bind: str) -> EngineConfig:
    return EngineConfig("m", device="cpu", cpu_omp_threads_bind=bind)


def here(claims: Path) -> CoreRegistry:
    return CoreRegistry(folder=claims)


def test_a_thread_is_bound_until_the_share_is_given_back(claims, caplog):
    before = allowed_cpus()
    with caplog.at_level("INFO"), ThreadShare(1, config(str(FIRST)), here(claims)) as share:
        assert share.cpus == {FIRST}
        assert torch.get_num_threads() == 1, "a list says how many threads there are"
        assert allowed_cpus() == before
        with share.bound():
            assert allowed_cpus() == {FIRST}
            with ThreadPoolExecutor(1) as later:
                assert later.submit(allowed_cpus).result() == {FIRST}, "threads that it starts"
        assert allowed_cpus() == before
        share.bind_thread()
        share.bind_thread()
        assert threads.unbound_cpus() == before
    assert allowed_cpus() == before
    assert f"threads are bound to CPU {FIRST} of NUMA node" in caplog.text


def test_each_thread_that_runs_steps_is_bound(claims):
    with ThreadShare(1, config(str(FIRST)), here(claims)) as share, ThreadPoolExecutor(1) as engine:
        engine.submit(share.bind_thread).result()
        assert engine.submit(allowed_cpus).result() == {FIRST}
        assert allowed_cpus() != {FIRST} or len(allowed_cpus()) == 1


def test_a_share_that_nobody_refers_to_is_given_back(claims):
    """As of an `LLM` that nobody has closed."""
    before, everywhere = torch.get_num_threads(), allowed_cpus()
    share = ThreadShare(1, config(str(FIRST)), here(claims))
    share.bind_thread()
    assert (torch.get_num_threads(), allowed_cpus()) == (1, {FIRST})
    del share
    assert (torch.get_num_threads(), allowed_cpus()) == (before, everywhere)
    with ThreadShare(1, config(str(FIRST)), here(claims)) as another:
        assert another.cpus == {FIRST}, "its claim is released, too"


@pytest.mark.skipif(len(allowed_cpus()) < 2, reason="a team needs two CPUs")
def test_the_team_that_a_thread_has_already_is_bound_with_it(claims):
    two = sorted(allowed_cpus())[:2]
    found = []

    def run() -> None:
        os.sched_setaffinity(0, two[:1])
        known = set(os.listdir("/proc/self/task"))
        torch.ones(1 << 20).add_(1)  # large enough for a team
        team = set(os.listdir("/proc/self/task")) - known
        os.sched_setaffinity(0, two)
        share = ThreadShare(1, config(f"{two[0]},{two[1]}"), here(claims))
        with share.bound():
            found.extend(os.sched_getaffinity(int(each)) for each in team)
        share.give_back()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert found == [set(two)]


def test_who_finds_no_core_runs_unbound_and_says_so_once(claims, caplog):
    everything = CoreRegistry(folder=claims).claim(len(here(claims).cores))
    with ThreadShare(1, config("auto"), here(claims)) as share:
        share.bind_thread()
        share.bind_thread()
        assert share.cpus == frozenset()
        assert allowed_cpus() >= everything.cpus
    everything.release()
    (record,) = caplog.records
    assert "threads are not bound to cores:" in record.message
    assert "other processes have claimed too many" in record.message


def test_a_container_that_shares_its_cores_binds_nothing(claims, caplog, monkeypatch):
    monkeypatch.setattr(threads, "shares_cpus", lambda: True)
    with ThreadShare(1, config("auto"), here(claims)) as share:
        assert share.cpus == frozenset()
    assert "the container's quota is less than its cores" in caplog.text
    with ThreadShare(1, config(str(FIRST)), here(claims)) as share:
        assert share.cpus == {FIRST}, "who names cores has his way"


@pytest.mark.parametrize(("size", "expected"), [(1, 64), (2, 32), (4, 16)])
def test_bound_ranks_compute_with_one_thread_a_physical_core(tmp_path, claims, monkeypatch, size, expected):
    monkeypatch.setattr(threads, "cores", lambda: 128)
    system = machine(tmp_path / "system", sockets=2, cores=32, smt=2)
    large = CoreRegistry(frozenset(range(128)), claims, system)
    before = torch.get_num_threads()
    torch.set_num_threads(128)
    shares = [ThreadShare(size, config("auto"), large) for _ in range(size)]
    assert torch.get_num_threads() == expected
    assert all(len(share.cpus) == expected for share in shares)
    assert frozenset().union(*(share.cpus for share in shares)) == set(range(64))
    for share in shares:
        share.give_back()
    assert torch.get_num_threads() == 128
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("some", "must be auto, nobind, or CPUs such as 0-3,8 or, by rank, \"0-3|4-7\", not 'some'"),
        ("", "must be auto, nobind, or CPUs"),
        ("0-3|", "must be auto, nobind, or CPUs"),
        ("0-3|3-6", "has CPU 3 more than once"),
        ("0-3|4-5", "must have as many CPUs for each rank"),
    ],
)
def test_a_list_that_is_none_is_refused(given, reason):
    with pytest.raises(ConfigError) as refused:
        config(given)
    assert reason in str(refused.value)
    assert refused.value.flag == "cpu_omp_threads_bind"


IN_ANOTHER_THREAD = """
import ctypes, threading, torch
from engine.threads import ThreadShare
library = next(line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line)
torch.set_num_threads(2)
found = []
def compute():
    ThreadShare(1).bind_thread()
    found.append(ctypes.CDLL(library).omp_get_max_threads())
thread = threading.Thread(target=compute)
thread.start()
thread.join()
print(found[0])
"""


def test_whichever_thread_computes_has_the_team_that_was_set_in_another_one():
    """As where torch was loaded before anybody knew how many threads a replica gets."""
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_THREAD],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "2", done.stderr
