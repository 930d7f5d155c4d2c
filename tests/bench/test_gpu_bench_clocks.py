"""What the GPU bench says of the state of the clocks, with an `nvidia-smi` that is played."""

from __future__ import annotations

import os
import subprocess
import time

import pytest
import torch

from tests.bench.gpu import __main__ as command
from tests.bench.gpu import machine as describing
from tests.bench.gpu.bench import Bench, OutOfTime
from tests.bench.gpu.clocks import REASONS, clocks, ranges, watched
from tests.bench.gpu.figures import Figure, Part
from tests.bench.gpu.results import Results
from tests.bench.gpu.scale import TINY

NEW, OLD = REASONS


def test_clocks_are_asked_for_in_the_words_of_old_drivers_too(monkeypatch):
    asked = []

    def smi(arguments, **_):
        asked.append(arguments[2])
        if "clocks_event_reasons" in arguments[2]:
            raise subprocess.CalledProcessError(2, arguments)
        values = "NVIDIA H200, 580.1, P0, 1980 MHz, 3201 MHz, 1980 MHz, 120 W, 700 W, 35, Enabled, 0x0000\n"
        return subprocess.CompletedProcess(arguments, 0, values)

    monkeypatch.setattr(subprocess, "run", smi)
    told = clocks(0)
    assert len(asked) == 2
    assert (told["clocks.sm"], told["power.limit"], told["clocks_throttle_reasons.active"]) == (
        "1980 MHz",
        "700 W",
        "0x0000",
    )
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: fail_to_find())
    assert clocks(0) == {}


def fail_to_find():
    raise FileNotFoundError("nvidia-smi")


def test_clocks_are_told_of_when_the_gpu_worked():
    lines = [
        "0 %, 345 MHz, 3201 MHz, 75.20 W, 31, 0x0000000000000001",
        "97 %, 1980 MHz, 3201 MHz, 612.50 W, 55, 0x0000000000000000",
        "100 %, 1755 MHz, 3201 MHz, 698.00 W, 61, 0x0000000000000004",
        "100 %, 1800 MHz, [N/A], [N/A], 60, 0x0000000000000004",
        "100 %, 18",
    ]
    assert ranges("\n".join(lines), NEW) == {
        "clocks.sm": "1755 to 1980 MHz",
        "clocks.mem": "3201 to 3201 MHz",
        "power.draw": "612.5 to 698 W",
        "temperature.gpu": "55 to 61 C",
        NEW: "0x0000000000000000 0x0000000000000004",
        "readings": "3",
    }
    assert ranges(lines[0], NEW) == ranges("", NEW) == ranges("No devices were found", NEW) == {}


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """An `nvidia-smi` that writes what it was asked, and one reading, and goes on until it is ended."""
    file = tmp_path / "nvidia-smi"
    file.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho "99 %, 1980 MHz, 3201 MHz, 600 W, 50, 0x0"\n'
        f"echo $$ > {tmp_path}/pid\nexec sleep 60\n"
    )
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def wait_for(file):
    deadline = time.monotonic() + 20
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return file.read_text()


def test_clocks_are_watched_from_beside(smi):
    with watched(3, OLD) as during:
        pid = int(wait_for(smi / "pid"))
        assert during == {}
    assert (during["clocks.sm"], during[OLD], during["readings"]) == ("1980 to 1980 MHz", "0x0", "1")
    assert "--id=3 --query-gpu=utilization.gpu,clocks.sm" in (smi / "asked").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_where_nobody_tells_clocks_there_are_none(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with watched(0, NEW) as during:
        pass
    assert during == {}


@pytest.mark.parametrize("ends", [None, OutOfTime])
def test_a_run_says_what_clocks_were_also_when_its_time_is_over(ends, smi, monkeypatch):
    def run(bench):
        wait_for(smi / "pid")
        bench.measure(lambda: 1.0, "p/a")
        if ends:
            raise ends

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(command, "machine", lambda device: {"clocks": {OLD: "0x0"}})
    monkeypatch.setattr(command, "clocks", lambda index: {"pstate": "P0"})
    bench = Bench(Results(smi / "r.json"), TINY, torch.device("cuda:0"), smi)
    try:
        command._run_here(Part("p", "P", (Figure("p/a", "a", "s"),), run), bench)
    except OutOfTime:
        assert ends
    (told,) = Results(smi / "r.json").runs
    assert told["clocks_during"]["clocks.sm"] == "1980 to 1980 MHz" and told["clocks_during"][OLD] == "0x0"
    assert told["clocks_after"] == {"pstate": "P0"}


def test_a_run_names_its_commit(tmp_path, monkeypatch):
    def git(*arguments):
        who = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
        subprocess.run(("git", "-C", tmp_path, *who, *arguments), check=True, capture_output=True)

    monkeypatch.setattr(describing, "ROOT", tmp_path)
    git("init")
    (tmp_path / "code").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    git("tag", "-a", "v1", "-m", "v1")
    found = describing.commit()
    assert len(found) == 10 and int(found, 16) >= 0
    (tmp_path / "code").write_text("2")
    assert describing.commit() == found + "+"
    monkeypatch.setenv("PATH", "")
    assert describing.commit() == ""
    assert describing.machine(torch.device("cpu"))["commit"] == ""
