"""`kill -9` of one of two replicas under streams: Squadron, and Ray Serve LLM in the same run.

    python -m tests.bench.peers install ray-llm
    python -m tests.bench.ray_llm [--runs 3] [--streams 32] [--tokens 200]

(`ray[llm]` itself wants a vLLM that needs a GPU; a build for CPUs stands in.) The same model,
prompts, clients and kill, one second after the streams began, each against its own undisturbed run. A replica of
Squadron is a tensor-parallel pair as in `tests.bench.kills`, one of Ray Serve LLM a single rank, its default.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
from rich.console import Console

from deploy.cli.processes import kill_all
from deploy.demo import demo_model_path
from tests.bench.kills import KILL_AFTER, Comparison, compare_once, comparison_table, served_demo
from tests.bench.machine import provenance
from tests.bench.peers.environments import default_root, last_lines, python_of
from tests.bench.siege import DIFFERS, SAME, verdict
from tests.chaos.streams import BROKEN, ERROR, HANG, SHORT, WHOLE, client_of, greedy_or_seeded, read_all
from tests.e2e.harness import free_port

START = 600.0  # seconds for Ray, Serve and the engines
BACK = 300.0  # after which it counts as not recovered
SERVER = Path(__file__).with_name("ray_llm_server.py")


@dataclass(frozen=True, slots=True)
class Asked:
    """How Ray Serve LLM serves. cpus: what Ray gives a replica. engine: vLLM's arguments. variables: of replicas.

    By default with one CPU a replica, as Squadron's replicas have in the same comparison.
    """

    replicas: int = 2
    cpus: float = 1
    engine: Mapping[str, Any] = field(
        default_factory=lambda: {
            "dtype": "float32",
            "max_model_len": 2048,
            "max_num_seqs": 64,
            "enforce_eager": True,
        }
    )
    variables: Mapping[str, str] = field(
        default_factory=lambda: {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    )


class Told:
    """What the server said last of its replicas, and when. pid: its own process."""

    def __init__(self, pipe: IO[str], replicas: int = 2, pid: int = 0) -> None:
        self.pid = pid
        self._pipe = pipe
        self._count = replicas
        self._changed = threading.Condition()
        self._last: dict[str, Any] | None = None
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self, timeout: float, without: int | None = None) -> float:
        """Return when all replicas serve, none of them the process `without`; infinity if not within `timeout`.

        Raises `RuntimeError` when the server has ended.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not whole(self._last, without, self._count):
                if self._ended:
                    raise RuntimeError("Ray Serve LLM has ended; its log says why")
                if not self._changed.wait(deadline - time.monotonic()):
                    return float("inf")
            return time.monotonic()

    @property
    def replicas(self) -> list[int]:
        """Processes of the replicas."""
        with self._changed:
            return list(self._last["pids"]) if self._last else []

    def _read(self) -> None:
        for line in self._pipe:
            with self._changed:
                self._last = json.loads(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def whole(told: dict[str, Any] | None, without: int | None, count: int) -> bool:
    """Whether `count` replicas serve, as Serve has it, none starts or stops, and none is the process `without`."""
    if told is None:
        return False
    return told["states"] == {"RUNNING": count} and len(set(told["pids"]) - {without}) == count


@contextmanager
def served_by_ray_llm(python: Path, port: int, asked: Asked = Asked()) -> Iterator[Told]:
    """Have replicas of the demo model serve in the block. Raises `RuntimeError`, with its last lines."""
    command = [str(python), str(SERVER), str(demo_model_path()), str(port), json.dumps(asdict(asked))]
    hidden = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    hidden["PATH"] = f"{python.parent}{os.pathsep}{hidden.get('PATH', '')}"  # the compiler's helpers
    log = tempfile.NamedTemporaryFile("w", prefix="ray-llm-", suffix=".log", delete=False)  # noqa: SIM115
    print(f"what Ray Serve LLM says goes to {log.name}")
    with log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=hidden,
            start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        told = Told(process.stdout, asked.replicas, process.pid)
        try:
            if told.wait(START) == float("inf"):
                raise RuntimeError(f"Ray Serve LLM did not serve within {START:g} s")
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{last_lines(Path(log.name).read_text(errors='replace'))}") from None
        yield told
    finally:
        started = descendants(process.pid)
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        kill_all(started)
        process.kill()
        process.wait()


def descendants(pid: int) -> list[psutil.Process]:
    """Return what a process has started, theirs included; none where it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


async def compare_theirs(told: Told, port: int, streams: int, tokens: int) -> Comparison:
    """Run the streams undisturbed, then again with a replica killed after a second: as `compare_once` does ours."""
    asked = [greedy_or_seeded(index, tokens) for index in range(streams)]
    async with client_of(f"http://127.0.0.1:{port}") as client:
        oracle = await read_all(client, asked)
        if failed := [stream.error for stream in oracle if stream.kind != WHOLE]:
            raise RuntimeError(f"the undisturbed run failed: {failed[:3]}")
        running = asyncio.create_task(read_all(client, asked))
        await asyncio.sleep(KILL_AFTER)
        victim, killed_at = told.replicas[0], time.monotonic()
        os.kill(victim, signal.SIGKILL)
        back = asyncio.create_task(asyncio.to_thread(told.wait, BACK, victim))
        disturbed = await running
    count = Counter(verdict(stream, same) for stream, same in zip(disturbed, oracle, strict=True))
    waits = [wait for stream in disturbed if (wait := stream.longest_wait(killed_at)) is not None]
    outcomes = (count[SAME], count[DIFFERS], count[ERROR], count[BROKEN], count[SHORT], count[HANG])
    return Comparison(*outcomes, await back - killed_at, max(waits, default=0.0))


def main() -> None:
    """Run both, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    installed = python_of("ray-llm", default_root())
    parser.add_argument(
        "--python", type=Path, default=installed, help="of the environment with Ray Serve LLM (default: %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    if not os.access(given.python, os.X_OK):
        parser.exit(2, f"--python {given.python}: there is no such program; --help says how it is made\n")
    figures: dict[str, Any] = {}
    with served_demo() as app:
        ours = [asyncio.run(compare_once(app, given.streams, given.tokens)) for _ in range(given.runs)]
    port = free_port()
    began = time.monotonic()
    with served_by_ray_llm(given.python, port) as told:
        figures["ray_llm_start_s"] = time.monotonic() - began
        theirs = [asyncio.run(compare_theirs(told, port, given.streams, given.tokens)) for _ in range(given.runs)]
    for name, runs in (("Squadron", ours), ("Ray Serve LLM", theirs)):
        table = comparison_table(runs)
        table.title = f"{name}: {table.title}"
        Console().print(table)
        figures[name] = [asdict(run) for run in runs]
    print(f"Ray Serve LLM took {figures['ray_llm_start_s']:.0f} s until both replicas served")
    if given.output:
        given.output.write_text(json.dumps(provenance() | figures, indent=2) + "\n")
    sys.exit(
        None if all(run.same == given.streams for run in ours) else "a stream of ours was not whole and the same"
    )


if __name__ == "__main__":
    main()
