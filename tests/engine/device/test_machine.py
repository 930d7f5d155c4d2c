"""How much of a machine is ours, as the control groups of a container say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.device.machine import NO_LIMIT, ControlGroups, cores, free_memory, shares_cpus

V1 = "5:memory:{0}\n4:cpu,cpuacct:{0}\n0::/\n"


def groups(folder: Path, own: str, files: dict[str, str]) -> ControlGroups:
    """Return control groups as the kernel shows them. files: text by path below the mounts."""
    for name, text in files.items():
        path = folder / "mounts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "own").write_text(own)
    return ControlGroups(folder / "mounts", folder / "own")


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


@pytest.mark.usefixtures("sixteen")
@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "6400000 100000\n"}, 16),
        ("0::/\n", {}, 16),
        ("0::/pod/box\n", {"pod/cpu.max": "200000 100000\n", "pod/box/cpu.max": "max 100000\n"}, 2),
        ("0::/../../elsewhere\n", {"cpu.max": "300000 100000\n"}, 3),
        (V1.format("/"), {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 16),
        (
            V1.format("/pod"),
            {"cpu,cpuacct/pod/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/pod/cpu.cfs_period_us": "10000\n"},
            5,
        ),
    ],
)
def test_cores_are_those_that_the_quota_pays_for(tmp_path, own, files, expected):
    found = groups(tmp_path, own, files)
    assert cores(found) == expected
    assert shares_cpus(found) is (expected < 16)


def test_cores_are_those_that_this_process_may_run_on(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert cores(groups(tmp_path, "0::/\n", {"cpu.max": "400000 100000\n"})) == 2
    assert cores(ControlGroups(tmp_path / "none", tmp_path / "none")) == 2


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, NO_LIMIT),
        ("0::/\n", {}, NO_LIMIT),
        ("0::/a\n", {"memory.max": "100\n", "memory.current": "30\n", "a/memory.max": "max\n"}, 70),
        ("0::/\n", {"memory.max": "100\n", "memory.current": "130\n"}, 0),
        (V1.format("/a"), {"memory/a/memory.limit_in_bytes": "9\n", "memory/a/memory.usage_in_bytes": "2\n"}, 7),
    ],
)
def test_memory_is_what_the_limits_leave(tmp_path, own, files, expected):
    assert groups(tmp_path, own, files).memory() == expected


def test_free_memory_is_plausible():
    assert 1 << 20 < free_memory() < 1 << 50
