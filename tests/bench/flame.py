"""Where the time of a served token goes: a flame picture of all processes of `squadron serve`, of one or more trees.

    python -m tests.bench.flame [--streams 32] [--seconds 20] [--output FILE.png] [TREE ...]

Each tree's `squadron serve demo`, one replica of one thread unless `--replicas` says more, is asked for streams all
the time, by the client of `tests.bench.peers.served`. Meanwhile py-spy samples the stacks of its Python processes, of
threads that are on a CPU. The CPU seconds that the kernel counts for a process are shared out among its stacks, and
told per token. Widths in the picture are microseconds of CPU; a function is drawn below the one that calls it.

Wants py-spy and matplotlib: `pip install '.[pictures]'`. py-spy must be allowed to trace other processes, as root is.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.bench.machine import provenance
from tests.bench.peers.__main__ import positive
from tests.bench.peers.served.client import ask
from tests.bench.serve_start import COMMAND, PROCESSES
from tests.e2e.command import Command
from tests.e2e.harness import free_port

RATE = 100  # samples a second of each process
SHARE = 0.004  # of all CPU time: narrower frames are not drawn
DEPTH = 26  # rows of frames that are drawn
ROW, INCHES, DOTS = 0.19, 15.0, 80  # height of a row and width of the picture in inches; dots an inch
LEAST_CPU = 0.01  # of a core: processes below are summed up as others
FRAME = re.compile(r"(?P<name>.+) \((?P<file>[^()]+?)(?::\d+)?\)$")
# Files whose functions only call others, on every stack.
BETWEEN = (
    "threading.py",
    "torch/nn/modules/module.py",
    "torch/utils/_contextlib.py",
    "<frozen runpy>",
    "forked_workers.py",
)
COLOURS = {"engine": "#f2a65a", "parallel": "#e07a5f", "cluster": "#5794f2", "deploy": "#81b29a", "tests": "#b0b0b0"}
ELSEWHERE, PROCESS = "#d5d2c8", "#9aa5b1"
Tree = dict[str, "Frame"]


@dataclass(slots=True)
class Frame:
    """A function as it was called by those above it. us: of CPU per token, with what it called. room: whose code."""

    us: float = 0.0
    room: str = ""
    called: Tree = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Profile:
    """What was found of one tree. tokens: that were served meanwhile. processes: name -> its frames."""

    name: str
    tokens: int
    seconds: float
    processes: Tree

    @property
    def us(self) -> float:
        """Microseconds of CPU per token, of all processes."""
        return sum(frame.us for frame in self.processes.values())


@dataclass(frozen=True, slots=True)
class Setting:
    """What a server is started and asked with. seconds: that are sampled."""

    streams: int
    seconds: int
    arguments: Sequence[str]


@dataclass(frozen=True, slots=True)
class Streamed:
    """One stream: when its first and its last token came, and how many there were."""

    began: float
    ended: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Samples:
    """What was seen of all processes, by process id, in a span of time. spent: CPU seconds. stacks: of py-spy."""

    began: float
    ended: float
    names: dict[int, str]
    spent: dict[int, float]
    stacks: dict[int, str]


def profiled(name: str, tree: Path, home: Path, setting: Setting) -> Profile:
    """Start a server of the code in `tree`, ask it, and return where its time went. Raises what a client does."""
    port = free_port()
    options = ("serve", "demo", "--port", str(port), *setting.arguments)
    command = Command(*options, home=home, folder=tree, PYTHONPATH=str(tree))
    try:
        command.wait_for("Ctrl-C stops it")
        asyncio.run(ask(port, range(setting.streams), 32))
        with _asked(port, setting.streams) as streams:
            samples = _sampled(psutil.Process(command.process.pid), setting.seconds)
    finally:
        command.ctrl_c()
        command.kill()
    tokens = tokens_within(streams, samples.began, samples.ended)
    return profile_of(name, samples, tokens)


@contextmanager
def _asked(port: int, count: int) -> Iterator[list[Streamed]]:
    """Keep a number of streams open in the block; what is yielded has all of them once the block is left."""
    streams: list[Streamed] = []
    failures: list[Exception] = []
    over = threading.Event()
    numbers = itertools.count(1000)

    async def one() -> None:
        while not over.is_set():
            began = time.perf_counter()
            (answer,) = (await ask(port, [next(numbers)])).answers
            streams.append(Streamed(began + answer.first_s, time.perf_counter(), answer.tokens))

    async def every() -> None:
        await asyncio.gather(*[one() for _ in range(count)])

    def run() -> None:
        try:
            asyncio.run(every())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield streams
    finally:
        over.set()
        thread.join()
    if failures:
        raise failures[0]


def tokens_within(streams: Sequence[Streamed], began: float, ended: float) -> float:
    """Return how many tokens came in a span of time; those of a stream come evenly."""
    shares = (
        each.tokens * max(0.0, min(each.ended, ended) - max(each.began, began)) / (each.ended - each.began)
        for each in streams
    )
    return sum(shares)


def _sampled(root: psutil.Process, seconds: int) -> Samples:
    """Sample all processes below `root` at once. Raises `RuntimeError` where py-spy cannot."""
    there = {each.pid: each for each in (root, *root.children(recursive=True))}
    with tempfile.TemporaryDirectory(prefix="squadron-flame-") as folder:
        files = {pid: Path(folder, str(pid)) for pid in there if _is_python(there[pid])}
        cpu, began = {pid: used(each) for pid, each in there.items()}, time.perf_counter()
        samplers = {
            pid: subprocess.Popen(
                [str(sampler_path()), "record", "--pid", str(pid), "--format", "raw", "--output", str(file),
                 "--rate", str(RATE), "--duration", str(seconds), "--nonblocking", "--threads"],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for pid, file in files.items()
        }  # fmt: skip
        said = {pid: sampler.communicate()[1] for pid, sampler in samplers.items()}
        ended = time.perf_counter()
        spent = {pid: used(each) - cpu[pid] for pid, each in there.items()}
        for pid, sampler in samplers.items():
            if sampler.returncode and there[pid].is_running() and spent[pid] > LEAST_CPU * seconds:
                raise RuntimeError(f"py-spy cannot sample process {pid}: {said[pid].strip()[-300:]}")
        stacks = {pid: file.read_text(encoding="utf-8") for pid, file in files.items() if file.exists()}
    names = {pid: COMMAND if pid == root.pid else _named(each) for pid, each in there.items()}
    return Samples(began, ended, names, spent, stacks)


def profile_of(name: str, samples: Samples, tokens: float) -> Profile:
    """Return where the time of each of so many tokens went."""
    seconds = samples.ended - samples.began
    processes: Tree = {}
    for pid, spent in samples.spent.items():
        worth = spent > LEAST_CPU * seconds
        whole = processes.setdefault(samples.names[pid] if worth else "others", Frame(room="process"))
        us = 1e6 * spent / tokens
        whole.us += us
        if worth:
            _grow(whole.called, samples.stacks.get(pid, ""), us)
    return Profile(name, round(tokens), seconds, dict(sorted(processes.items(), key=lambda one: -one[1].us)))


def _grow(frames: Tree, folded: str, us: float) -> None:
    """Add the stacks that py-spy has counted, `us` in all."""
    stacks = [line.rpartition(" ") for line in folded.splitlines()]
    total = sum(int(count) for _, _, count in stacks)
    for stack, _, count in stacks:
        level = frames
        for call in stack.split(";"):
            label, room = _frame(call)
            if label is None:
                continue
            frame = level.setdefault(label, Frame(room=room))
            frame.us += us * int(count) / total
            level = frame.called


def _frame(call: str) -> tuple[str | None, str]:
    """Return how a frame is shown, and whose it is. None: it says nothing."""
    if call.startswith(("thread ", "process ")):
        return None, ""
    found = FRAME.match(call)
    if found is None:
        return call, ""
    file = found["file"]
    if file.endswith(BETWEEN):
        return None, ""
    room = next((room for room in COLOURS if file.startswith(f"{room}/") or f"/{room}/" in file), "")
    if room and not Path(file).is_relative_to(sys.prefix) and "site-packages" not in file:
        return f"{found['name']} · {Path(file).stem}", room
    return f"{found['name']} · {Path(file).name}", "elsewhere"


def sampler_path() -> Path | None:
    """Return where py-spy is: beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("py-spy")
    found = beside if beside.exists() else shutil.which("py-spy")
    return Path(found) if found else None


def used(process: psutil.Process) -> float:
    """Return the CPU seconds of a process."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def _is_python(process: psutil.Process) -> bool:
    try:
        return "python" in Path(process.exe()).name
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _named(process: psutil.Process) -> str:
    try:
        words = " ".join(process.cmdline()[:3])
    except psutil.NoSuchProcess:
        return "others"
    return next((name for part, name in PROCESSES.items() if part in words), "others")


def draw(profiles: Sequence[Profile], file: Path) -> None:
    """Write the picture: the profiles below each other, on one scale."""
    from matplotlib.figure import Figure

    heights = [1 + min(DEPTH, _depth(profile.processes, SHARE * profile.us)) for profile in profiles]
    figure = Figure(figsize=(INCHES, ROW * (sum(heights) + 3 * len(profiles))), facecolor="white")
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set_axis_off()
    scale = max(profile.us for profile in profiles)
    axes.set_xlim(0, scale)
    axes.set_ylim(sum(heights) + 3 * len(profiles), 0)
    top = 0.0
    for profile, height in zip(profiles, heights, strict=True):
        title = f"{profile.name}: {profile.us:.0f} us of CPU a token, {profile.tokens / profile.seconds:.0f} tokens/s"
        axes.text(0, top + 1.3, title, fontsize=11, weight="bold", va="center")
        _boxes(axes, profile.processes, 0.0, top + 2, SHARE * profile.us, top + 2 + height)
        top += height + 3
    figure.savefig(file, dpi=DOTS)


def _depth(frames: Tree, least: float) -> int:
    return max((1 + _depth(frame.called, least) for frame in frames.values() if frame.us >= least), default=0)


def _boxes(axes, frames: Tree, left: float, top: float, least: float, bottom: float) -> None:
    """Draw frames side by side, widest first, and below each what it called."""
    from matplotlib.patches import Rectangle

    per_us = INCHES * DOTS / axes.get_xlim()[1]
    for label, frame in sorted(frames.items(), key=lambda one: -one[1].us):
        if frame.us < least or top >= bottom:
            continue
        colour = PROCESS if frame.room == "process" else COLOURS.get(frame.room, ELSEWHERE)
        axes.add_patch(Rectangle((left, top), frame.us, 0.92, facecolor=colour, edgecolor="white", linewidth=0.5))
        letters = int(frame.us * per_us / 5.4)
        if letters >= 4:
            text = f"{label} {frame.us:.0f} us"
            shown = text if len(text) <= letters else label[:letters]
            axes.text(left + 3 / per_us, top + 0.48, shown, fontsize=6.5, va="center", family="monospace")
        _boxes(axes, frame.called, left, top + 1, least, bottom)
        left += frame.us


def markdown(profiles: Sequence[Profile]) -> str:
    """Return a table of microseconds of CPU a token, by process."""
    names = list(dict.fromkeys(name for profile in profiles for name in profile.processes))
    lines = ["| CPU a token, us | " + " | ".join(profile.name for profile in profiles) + " |"]
    lines.append("| --- |" + " ---: |" * len(profiles))
    for name in names:
        values = [profile.processes[name].us if name in profile.processes else 0 for profile in profiles]
        lines.append(f"| {name} | " + " | ".join(f"{value:.0f}" for value in values) + " |")
    lines.append("| all | " + " | ".join(f"{profile.us:.0f}" for profile in profiles) + " |")
    lines.append("| tokens/s | " + " | ".join(f"{each.tokens / each.seconds:.0f}" for each in profiles) + " |")
    return "\n".join(lines)


def main() -> int:
    """Profile and draw; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE", help="checkouts (default: this one)")
    parser.add_argument("--names", nargs="+", help="of the trees, as the picture shows them (default: their folders)")
    parser.add_argument("--streams", type=positive, default=32, help="at once (default: %(default)s)")
    parser.add_argument("--seconds", type=positive, default=20, help="that are sampled (default: %(default)s)")
    parser.add_argument("--replicas", type=positive, default=1, help="of each server (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="the picture (default: none)")
    options = parser.parse_args()
    if sampler_path() is None:
        parser.error("there is no py-spy here; pip install '.[pictures]'")
    trees = [tree.absolute() for tree in options.trees] or [Path(__file__).parents[2]]
    names = options.names or [tree.name for tree in trees]
    if len(names) != len(trees):
        parser.error(f"--names: there are {len(trees)} trees and {len(names)} names; give as many")
    os.environ.pop("OMP_NUM_THREADS", None)
    setting = Setting(options.streams, options.seconds, ("--replicas", str(options.replicas)))
    with tempfile.TemporaryDirectory(prefix="squadron-flame-", ignore_cleanup_errors=True) as home:
        profiles = [profiled(name, tree, Path(home), setting) for name, tree in zip(names, trees, strict=True)]
    print(f"{provenance()}\n\n{markdown(profiles)}")
    if options.output:
        draw(profiles, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
