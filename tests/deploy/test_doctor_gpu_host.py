"""`squadron doctor`: what it says of drivers, links, locked memory and clocks."""

from __future__ import annotations

import pytest

from deploy.cli.terminal import GIB, MIB
from deploy.doctor import gpu_host
from deploy.doctor.checks import Level
from deploy.doctor.gpu_host import (
    Port,
    check_clock,
    check_infiniband,
    check_links,
    clock,
    driver,
    driver_version,
    ib_ports,
    infiniband,
    links,
    may_lock_all,
    memlock,
    pairs,
)
from deploy.doctor.machine import devices

# Of four GPUs, the first two and the last two are bridged. The command underlines the heads of columns.
BRIDGED = """
	\x1b[4mGPU0	GPU1	GPU2	GPU3	NIC0	CPU Affinity	NUMA Affinity	GPU NUMA ID\x1b[0m
GPU0	 X 	NV12	SYS	SYS	PIX	0-31	0		N/A
GPU1	NV12	 X 	SYS	SYS	PIX	0-31	0		N/A
GPU2	SYS	SYS	 X 	NV12	SYS	32-63	1		N/A
GPU3	SYS	SYS	NV12	 X 	SYS	32-63	1		N/A
NIC0	PIX	PIX	SYS	SYS	 X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""
SWITCHED = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-47\nGPU1\tNV18\t X \t0-47\n"
PLAIN = SWITCHED.replace("NV18", "NODE")
ALONE = "\tGPU0\tCPU Affinity\nGPU0\t X \t0-47\n"
ON, OFF = Port("mlx5_0", True, "400 Gb/sec (4X NDR)"), Port("mlx5_1", False, "10 Gb/sec")


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Oct 14 00:00:00 UTC 2026",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)",
    ],
)
def test_the_drivers_version_is_read(tmp_path, line):
    file = tmp_path / "version"
    file.write_text(f"{line}\nGCC version:  gcc version 13.3.0\n")
    assert driver_version(file) == "580.159.04"
    assert driver_version(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("version", "cuda", "level"),
    [
        ("580.65.06", "13.0", "ok"),
        ("575.57.08", "13.0", "fix"),
        ("575.57.08", "12.8", "ok"),
        ("520.61", "12.1", "fix"),
        ("700.1", "19.0", "warning"),
    ],
)
def test_a_driver_older_than_its_cuda_needs_is_to_be_updated(version, cuda, level):
    found = driver(version, cuda)
    assert (found.check, found.level.value) == ("driver", level)
    assert version in found.text


def test_the_driver_is_named_beside_the_gpus_and_where_torch_sees_none():
    report = {"torch": "2.13.0", "cuda": "13.0", "gpus": [], "complaint": "The driver is too old", "available": False}
    gpus, found = devices(1, lambda: report, "535.54.03")
    assert gpus.level is found.level is Level.FIX
    assert found.text == "535.54.03, but torch is built for CUDA 13.0, which needs 580 or later"
    gpu = {"name": "NVIDIA H200", "free": 139 * GIB, "total": 140 * GIB}
    whole = report | {"gpus": [gpu], "nccl": True, "triton": True, "flash_attn": False}
    assert [each.check for each in devices(1, lambda: whole, "580.1")] == ["gpus", "driver", "nccl", "attention"]


def test_an_old_driver_whose_gpus_work_keeps_nobody_from_serving():
    """A container may bring the rest of a newer driver with it (CUDA's forward compatibility)."""
    gpu = {"name": "NVIDIA A100-SXM4-80GB", "free": 79 * GIB, "total": 79 * GIB}
    report = {"torch": "2.13.0", "cuda": "13.0", "gpus": [gpu], "nccl": True, "triton": True, "flash_attn": False}
    found = devices(1, lambda: report, "535.54.03")[1]
    assert (found.check, found.level) == ("driver", Level.WARNING)
    assert "forward compatibility" in found.text


@pytest.mark.parametrize(("verbs", "level"), [(True, "fix"), (False, "ok")])
def test_locked_memory_matters_where_the_ports_can_be_used(monkeypatch, verbs, level):
    """A card of the host shows in every container, whose NCCL goes over TCP without its devices."""
    monkeypatch.setattr(gpu_host, "ib_ports", lambda: [ON])
    monkeypatch.setattr(gpu_host, "may_lock_all", lambda: False)
    monkeypatch.setattr(gpu_host.resource, "getrlimit", lambda _: (8 * MIB, 8 * MIB))
    monkeypatch.setattr(gpu_host.Path, "glob", lambda *_: iter(["uverbs0"] if verbs else []))
    assert check_infiniband()[1].level == level


def test_what_joins_each_pair_of_gpus_is_read():
    ways = pairs(BRIDGED)
    assert len(ways) == 6
    assert ways[0, 1] == ways[2, 3] == "NV12"
    assert ways[1, 2] == "SYS"


@pytest.mark.parametrize(
    ("table", "level", "words"),
    [
        (SWITCHED, "ok", "NVLink joins all GPUs (NV18)"),
        (BRIDGED, "warning", "joins 2 of 6 pairs; others, such as 0 and 2, meet by SYS"),
        (PLAIN, "warning", "no NVLink: ranks meet by NODE"),
        (ALONE, "ok", "nothing to join"),
        ("", "ok", "nothing to join"),
        (None, "ok", "no nvidia-smi"),
    ],
)
def test_links_between_gpus(table, level, words):
    found = links(lambda: table)
    assert found.level == level
    assert words in found.text
    assert bool(found.remedy) is (level != "ok")


def test_ports_of_infiniband_are_read(tmp_path):
    for card, state, rate in (("mlx5_0", "4: ACTIVE", ON.rate), ("mlx5_1", "1: DOWN", OFF.rate)):
        place = tmp_path / card / "ports" / "1"
        place.mkdir(parents=True)
        (place / "state").write_text(f"{state}\n")
        (place / "rate").write_text(f"{rate}\n")
    assert ib_ports(tmp_path) == [ON, OFF]
    assert ib_ports(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("ports", "verbs", "level", "words"),
    [
        ([], False, "ok", "none here"),
        ([ON, OFF], True, "ok", "1 of 2 ports active, 400 Gb/sec (4X NDR)"),
        ([OFF], True, "warning", "none of 1 ports is active"),
        ([ON], False, "warning", "NCCL would use TCP"),
    ],
)
def test_infiniband(ports, verbs, level, words):
    found = infiniband(ports, verbs)
    assert found.level == level
    assert words in found.text


@pytest.mark.parametrize(
    ("soft", "free", "used", "level"),
    [
        (-1, False, True, "ok"),
        (8 * MIB, True, True, "ok"),
        (8 * MIB, False, True, "fix"),
        (8 * MIB, False, False, "ok"),
    ],
)
def test_locked_memory(soft, free, used, level):
    found = memlock(soft, free, used)
    assert found.level == level
    assert ("memlock=-1" in found.remedy) is (level == "fix")


def test_a_process_that_may_lock_all_is_known_by_its_capabilities(tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nCapEff:\t0000000000004000\n")
    assert may_lock_all(status)
    status.write_text("Name:\tpython\nCapEff:\t00000000a80425fb\n")  # Docker's usual ones
    assert not may_lock_all(status)
    assert not may_lock_all(tmp_path / "none")


@pytest.mark.parametrize(
    ("current", "available", "level", "words"),
    [
        ("tsc", ["tsc", "hpet"], "ok", ""),
        ("kvm-clock", ["kvm-clock"], "ok", ""),
        ("", [], "ok", ""),
        ("hpet", ["tsc", "hpet"], "warning", "echo tsc >"),
        ("xen", ["xen"], "warning", "no other is offered"),
    ],
)
def test_clocks(current, available, level, words):
    found = clock(current, available)
    assert found.level == level
    assert words in found.remedy


def test_this_machine_has_an_answer_to_each():
    assert [each.check for each in (*check_links(), *check_infiniband(), *check_clock())] == [
        "gpu links",
        "infiniband",
        "memlock",
        "clock",
    ]
