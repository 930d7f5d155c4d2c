"""Whether the machine around the GPUs is fit: driver, what joins them, InfiniBand, locked memory, the clock."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.cli.terminal import gib
from deploy.doctor.checks import Finding, fix, ok, warning

DRIVER_FILE = Path("/proc/driver/nvidia/version")
# Oldest driver for all minor versions of a CUDA: NVIDIA, "CUDA Compatibility", minor version compatibility, table 1.
DRIVER_FLOORS: Mapping[int, int] = {11: 450, 12: 525, 13: 580}
SMI_SECONDS = 20.0
CAP_IPC_LOCK = 14  # linux/capability.h: its holder locks as much memory as it likes
MEMLOCK = (
    "docker run --ulimit memlock=-1 or --cap-add IPC_LOCK; memlock in limits.conf; LimitMEMLOCK=infinity of systemd"
)
CLOCKS = Path("/sys/devices/system/clocksource/clocksource0")
# Clocks that are read without a system call (Linux, arch/*/include/asm/vdso): x86, KVM, Hyper-V, and Arm.
FAST_CLOCKS = frozenset({"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"})


def driver_version(file: Path = DRIVER_FILE) -> str | None:
    """Return the version of NVIDIA's driver that runs, None where there is none."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text, re.MULTILINE)
    return found[1] if found else None


def driver(version: str, cuda: str, works: bool = False) -> Finding:
    """Return whether a driver is new enough for the CUDA that torch was built for, such as 13.0.

    works: whether torch sees GPUs, as it may with an older driver: CUDA's package of forward compatibility brings the
    part of a newer one that is no kernel's (NVIDIA, "CUDA Compatibility", forward compatibility).
    """
    floor = DRIVER_FLOORS.get(int(cuda.partition(".")[0]))
    if floor is None:
        return warning(
            "driver", f"{version}; which one CUDA {cuda} needs is not known here", "see NVIDIA's CUDA release notes"
        )
    if int(version.partition(".")[0]) < floor and works:
        return warning(
            "driver",
            f"{version}, older than the {floor} of CUDA {cuda}: the GPUs work by CUDA's forward compatibility",
            f"update NVIDIA's driver to {floor} or later: not every driver and GPU has that compatibility",
        )
    if int(version.partition(".")[0]) < floor:
        return fix(
            "driver",
            f"{version}, but torch is built for CUDA {cuda}, which needs {floor} or later",
            f"update NVIDIA's driver to {floor} or later, or install a build of torch for an older CUDA",
        )
    return ok("driver", f"{version} (for CUDA {cuda}: {floor} or later)")


def check_links() -> list[Finding]:
    """Ask `nvidia-smi` what joins the GPUs."""
    return [links(_topology)]


def _topology() -> str | None:
    """Return what `nvidia-smi topo -m` prints, None where there is no such command."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    run = subprocess.run(
        [command, "topo", "-m"], capture_output=True, text=True, timeout=SMI_SECONDS, check=False, errors="replace"
    )
    return run.stdout if run.returncode == 0 else ""


def links(topology: Callable[[], str | None]) -> Finding:
    """Return what joins the GPUs. topology: as `nvidia-smi topo -m` prints it, None = there is no such command."""
    name = "gpu links"
    table = topology()
    if table is None:
        return ok(name, "no nvidia-smi here: not asked")
    ways = pairs(table)
    if not ways:
        return ok(name, "fewer than two GPUs: nothing to join")
    joined = sum(way.startswith("NV") for way in ways.values())
    if joined == len(ways):
        return ok(name, f"NVLink joins all GPUs ({', '.join(sorted(set(ways.values())))})")
    others = ", ".join(sorted({way for way in ways.values() if not way.startswith("NV")}))
    if joined:
        lone = next(pair for pair, way in ways.items() if not way.startswith("NV"))
        return warning(
            name,
            f"NVLink joins {joined} of {len(ways)} pairs; others, such as {lone[0]} and {lone[1]}, meet by {others}",
            "let CUDA_VISIBLE_DEVICES put GPUs that NVLink joins side by side, and split models over those",
        )
    return warning(
        name,
        f"no NVLink: ranks meet by {others} of PCIe",
        "where a model fits one GPU, --replicas makes more of them than --tensor-parallel-size; `squadron plan` says "
        "what sums cost",
    )


def pairs(table: str) -> dict[tuple[int, int], str]:
    """Return what joins each pair of GPUs, such as NV18, PIX or SYS, from a table of `nvidia-smi topo -m`."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", table)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    return {
        (int(row[0][3:]), column): row[1 + column]
        for row in rows
        for column in range(int(row[0][3:]) + 1, min(len(rows), len(row) - 1))
    }


@dataclass(frozen=True, slots=True)
class Port:
    """One port of an InfiniBand or RoCE card. rate: as the driver writes it, such as 400 Gb/sec (4X NDR)."""

    card: str
    active: bool
    rate: str


def ib_ports(folder: Path = Path("/sys/class/infiniband")) -> list[Port]:
    """Return the ports that the kernel knows."""
    return [
        Port(
            place.parents[1].name,
            "ACTIVE" in _line(place / "state"),
            _line(place / "rate"),
        )
        for place in sorted(folder.glob("*/ports/*"))
    ]


def check_infiniband() -> list[Finding]:
    """Check InfiniBand and RoCE, and how much memory may be locked, which their transfers need."""
    ports, verbs = ib_ports(), any(Path("/dev/infiniband").glob("uverbs*"))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    used = verbs and any(port.active for port in ports)
    return [infiniband(ports, verbs), memlock(soft, may_lock_all(), used)]


def infiniband(ports: Sequence[Port], verbs: bool) -> Finding:
    """Return whether NCCL can use InfiniBand or RoCE. verbs: whether this process sees /dev/infiniband/uverbs*."""
    name = "infiniband"
    active = [port for port in ports if port.active]
    if not ports:
        return ok(name, "none here: only groups over several hosts would use it")
    if not active:
        return warning(
            name, f"none of {len(ports)} ports is active", "see `ibstat`: cable, switch, or subnet manager"
        )
    rates = ", ".join(sorted({port.rate for port in active}))
    text = f"{len(active)} of {len(ports)} ports active, {rates}"
    if not verbs:
        return warning(
            name,
            f"{text}, but there is no /dev/infiniband/uverbs*: NCCL would use TCP",
            "give the container the devices: docker run --device /dev/infiniband; on Kubernetes a resource such as "
            "rdma/hca",
        )
    return ok(name, text)


def memlock(soft: int, free: bool, used: bool) -> Finding:
    """Return whether enough memory may be locked.

    soft: bytes, negative = no limit. free: whether limits do not count.
    used: whether NCCL can use InfiniBand, whose transfers lock its buffers (NCCL user guide, Troubleshooting).
    """
    if soft < 0 or free:
        return ok("memlock", "no limit of locked memory" if soft < 0 else "CAP_IPC_LOCK: limits do not count")
    if used:
        return fix("memlock", f"{gib(soft)} may be locked, which NCCL over InfiniBand exceeds", MEMLOCK)
    return ok("memlock", f"{gib(soft)} may be locked; without InfiniBand nothing asks for more")


def may_lock_all(status: Path = Path("/proc/self/status")) -> bool:
    """Whether this process holds CAP_IPC_LOCK."""
    try:
        found = re.search(r"^CapEff:\s*([0-9a-f]+)", status.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return False
    return found is not None and bool(int(found[1], 16) >> CAP_IPC_LOCK & 1)


def check_clock() -> list[Finding]:
    """Check what the kernel reads the time from."""
    return [clock(_line(CLOCKS / "current_clocksource"), _line(CLOCKS / "available_clocksource").split())]


def clock(current: str, available: Sequence[str]) -> Finding:
    """Return whether the time is cheap to read, as each step and token does. current: "" where it is not known."""
    if not current:
        return ok("clock", "this system does not say what it reads the time from")
    if current in FAST_CLOCKS:
        return ok("clock", f"{current}, read without a system call")
    better = next((name for name in available if name in FAST_CLOCKS), None)
    text = f"{current}: each look at the time is a system call"
    if better is None:
        return warning("clock", text, "no other is offered; see `dmesg | grep -i clocksource` for why")
    return warning(
        "clock", text, f"echo {better} > {CLOCKS}/current_clocksource, as root; on boot: clocksource={better}"
    )


def _line(file: Path) -> str:
    """Return what a file of the kernel holds; "" where it cannot be read."""
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
