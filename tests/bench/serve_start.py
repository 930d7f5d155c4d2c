"""Seconds and CPU seconds from `squadron serve demo` to the first token of a first request, by phase and by process.

    python -m tests.bench.serve_start [before=../before after=.] [--rounds 3]

Each side is NAME=TREE, a working tree; they start in turns, one at a time. The request is sent as soon as the port
takes connections and waits in the router, as a client's would. One start of each side goes before, in which the
kernels are compiled and Python's byte code is written. Where other work shares the machine, go by the CPU seconds and
by the least of several rounds.

Times of the command are those of its lines; of processes, those that the kernel has of their start; of deployments,
those in Serve's logs. CPU seconds are those of each process at the first token, of ended ones when last seen.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psutil

from tests.bench.machine import provenance
from tests.e2e.command import Command
from tests.e2e.harness import free_port

TIMEOUT = 180.0
LOOK_SECONDS = 0.02
SAMPLE_SECONDS = 0.5
PHASES = ("Ray", "Serve", "Placement", "Weights", "KV blocks", "Warm-up", "Ready")  # lines of the command
STARTED, FINISHED = "Started initializing replica.", "Finished initializing replica."
CONTROLLER = "Controller starting"
STAMP = re.compile(r"^\w+ (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ")
PROCESSES = {
    "ServeController": "controller",
    "ServeReplica:squadron:Replica": "replica",
    "ServeReplica:squadron:Router": "router",
    "ServeReplica:squadron:Gateway": "gateway",
    "WorkerActor": "rank 1 and up",
    "DashboardAgent": "Ray's dashboard agent",
    "RuntimeEnvAgent": "Ray's runtime env agent",
    "ray::IDLE": "Ray's idle workers",
    "gcs_server": "Ray's control store",
    "log_monitor.py": "Ray's log monitor",
    "monitor.py": "Ray's autoscaler monitor",
    "dashboard.py": "Ray's dashboard head",
    "dashboard/agent.py": "Ray's dashboard agent",
    "runtime_env/agent": "Ray's runtime env agent",
    "raylet/raylet": "Ray's raylet",
    "default_worker.py": "Ray's idle workers",
    "orphans.py": "watch of orphans",
}
COMMAND = "command"


@dataclass(frozen=True, slots=True)
class Seen:
    """A process as it was seen last. created: seconds since 1970. cpu: seconds."""

    name: str
    created: float
    cpu: float


@dataclass(slots=True)
class Watch:
    """Looks at all processes of a command now and then. `seen`: by process id."""

    root: psutil.Process
    seen: dict[int, Seen] = field(default_factory=dict)
    logs: Path | None = None

    def look(self) -> None:
        """Take in what every process has used until now."""
        with suppress(psutil.NoSuchProcess):
            for process in (self.root, *self.root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    self._take(process)

    def _take(self, process: psutil.Process) -> None:
        words = process.cmdline()
        used = process.cpu_times()
        name = COMMAND if process.pid == self.root.pid else _process_name(" ".join(words[:3]))
        if name is None:
            return
        self.seen[process.pid] = Seen(name, process.create_time(), used.user + used.system)
        for word in words:
            if word.startswith("--log_dir="):
                self.logs = Path(word.removeprefix("--log_dir="))

    def created(self, name: str) -> float | None:
        """Return when the first process of a name was made."""
        return min((one.created for one in self.seen.values() if one.name == name), default=None)

    def cpu(self) -> dict[str, float]:
        """Return the CPU seconds by name of process, most first."""
        totals: Counter[str] = Counter()
        for one in self.seen.values():
            totals[one.name] += one.cpu
        return dict(totals.most_common())


def _process_name(words: str) -> str | None:
    if not words:
        return None  # it has ended
    return next((name for part, name in PROCESSES.items() if part in words), "others")


@dataclass(frozen=True, slots=True)
class Start:
    """One start. moments: what -> seconds since the command was started. cpu: process -> CPU seconds."""

    moments: dict[str, float]
    cpu: dict[str, float]


def start(tree: Path, home: Path, arguments: Sequence[str] = ()) -> Start:
    """Start a server of the code in `tree`, ask for one token, and end it."""
    port = free_port()
    began = time.time()
    options = ("serve", "demo", "--port", str(port), *arguments)
    command = Command(*options, home=home, folder=tree, PYTHONPATH=str(tree))
    moments: dict[str, float] = {}
    watch = Watch(psutil.Process(command.process.pid))
    client = threading.Thread(target=_first_token, args=(port, moments), daemon=True)
    try:
        client.start()
        _follow(command, watch, moments, client)
        watch.look()
        moments |= {what: at for what, at in _logged(watch) if at is not None}
        passed = {what: at - began for what, at in sorted(moments.items(), key=lambda one: one[1])}
        return Start(passed, watch.cpu())
    finally:
        command.ctrl_c()
        command.kill()


def _follow(command: Command, watch: Watch, moments: dict[str, float], client: threading.Thread) -> None:
    """Note when lines come, in seconds since 1970, until there is a token. Raises `RuntimeError` where none comes."""
    deadline = time.monotonic() + TIMEOUT
    read = 0
    sampled = 0.0
    while client.is_alive() or "Ready" not in moments:
        for line in command.lines[read:]:
            read += 1
            label = next((one for one in PHASES if line.startswith(one)), None)
            if label is not None:
                moments.setdefault(label, time.time())
        if time.monotonic() > deadline or command.process.poll() is not None:
            raise RuntimeError(f"no token within {TIMEOUT:g} s:\n{command.text}")
        if time.monotonic() - sampled > SAMPLE_SECONDS:
            sampled = time.monotonic()
            watch.look()
        time.sleep(LOOK_SECONDS)


def _first_token(port: int, moments: dict[str, float]) -> None:
    """Ask for one token as soon as the port is open."""
    body = json.dumps({"model": "demo", "prompt": "import os\n", "max_tokens": 1, "stream": True, "temperature": 0})
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
        try:
            connection.connect()
            moments.setdefault("port open", time.time())
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            line = answer.readline()
        except (OSError, http.client.HTTPException):
            time.sleep(LOOK_SECONDS)
            continue
        finally:
            connection.close()
        if answer.status == 200 and line.startswith(b"data:"):
            moments["first token"] = time.time()
            return
        moments.setdefault(f"answered {answer.status}", time.time())
        time.sleep(LOOK_SECONDS)


def _logged(watch: Watch) -> Iterator[tuple[str, float | None]]:
    """Yield what the kernel and Serve's logs know, in seconds since 1970."""
    yield "control store started", watch.created(PROCESSES["gcs_server"])
    yield "raylet started", watch.created(PROCESSES["raylet/raylet"])
    for name in ("controller", "replica", "router", "gateway", "rank 1 and up"):
        yield f"process of {name}", watch.created(name)
    logs = watch.logs / "serve" if watch.logs is not None else Path("/nowhere")
    for file in sorted(logs.glob("*.log")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.name.startswith("controller"):
            yield "controller serves", _stamp_of(text, CONTROLLER)
            continue
        name = file.name.split("_")[2].lower()
        yield f"{name} constructed from", _stamp_of(text, STARTED)
        yield f"{name} constructed", _stamp_of(text, FINISHED)


def _stamp_of(text: str, words: str) -> float | None:
    line = next((one for one in text.splitlines() if words in one), "")
    found = STAMP.match(line)
    return None if found is None else datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()


def table(starts: Mapping[str, Sequence[Start]]) -> str:
    """Lay out the moments, then the CPU seconds: of each side the least and the median."""
    lines = ["| moment, s | " + " | ".join(starts) + " |", "| --- |" + " --- |" * len(starts)]
    lines += _rows(starts, {name: [one.moments for one in rounds] for name, rounds in starts.items()})
    lines += ["", "| CPU, s | " + " | ".join(starts) + " |", "| --- |" + " --- |" * len(starts)]
    with_sum = {
        name: [{"all processes": sum(one.cpu.values()), **one.cpu} for one in rounds]
        for name, rounds in starts.items()
    }
    return "\n".join([*lines, *_rows(starts, with_sum)])


def _rows(names: Mapping[str, object], rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[str]:
    for label in dict.fromkeys(label for name in names for one in rounds[name] for label in one):
        cells = []
        for name in names:
            values = [one[label] for one in rounds[name] if label in one]
            cells.append(f"{min(values):.2f} / {statistics.median(values):.2f}" if values else "-")
        yield f"| {label} | " + " | ".join(cells) + " |"


def _side(text: str) -> tuple[str, Path]:
    name, _, tree = text.partition("=")
    if not name or not (Path(tree) / "deploy" / "main.py").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=TREE, such as before=../before")
    return name, Path(tree).resolve()


def main() -> None:
    """Start the sides in turns, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", type=_side, nargs="*", metavar="NAME=TREE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arguments", default="", help="More flags of `squadron serve`, in one string.")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error(f"--rounds must be 1 or more, not {given.rounds}")
    sides = given.sides or [_side("here=.")]
    print(json.dumps(provenance()))
    starts: dict[str, list[Start]] = {name: [] for name, _ in sides}
    with ExitStack() as stack:
        homes = {
            name: Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            for name, _ in sides
        }
        for number in range(-1, given.rounds):
            for name, tree in sides:
                one = start(tree, homes[name], given.arguments.split())
                print(
                    f"{'warm-up' if number < 0 else f'round {number + 1}'}, {name}: first token after "
                    f"{one.moments['first token']:.2f} s, {sum(one.cpu.values()):.2f} CPU s",
                    flush=True,
                )
                if number >= 0:
                    starts[name].append(one)
    print("\nThe least and the median of the rounds.\n")
    print(table(starts))


if __name__ == "__main__":
    main()
