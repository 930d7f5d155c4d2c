"""A batch on the command line, and all that may befall it: its driver, its replicas, its ledger, its disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import psutil

from deploy.cli.processes import kill_all
from tests.chaos.batch_driver import TALLY
from tests.lifetime import DIE_WITH_PARENT

CREATED = "1700000000"
SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 3}
# By the number of a row modulo 48: those of chats are divisible by three.
SPECIAL: dict[int, dict[str, Any]] = {
    3: {"stop": ["e", "\n"]},
    4: {"logprobs": 3},
    6: {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False},
    28: {"structured_outputs": {"regex": "[a-z ]{20,200}"}, "ignore_eos": False},
    31: {"stop": ["self"], "n": 3},
}
WORDS = ("def", "class", "import os", "for line in", "return", "with open(", "if not", "while True:", "try:")
DRIVER, REPLICA, RANK, TORN, FULL = "driver", "replica", "worker rank", "torn write", "full disk"
KINDS = (DRIVER, REPLICA, RANK, TORN, FULL)
END_SECONDS = 600.0
# The driver as `__main__` of its file, as `python FILE` runs it.
PROGRAM = DIE_WITH_PARENT + "import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
STARTER = Path(__file__).with_name("batch_driver.py")


def rows(count: int, tokens: int, seed: int = 0) -> list[dict[str, Any]]:
    """Requests of every kind, one bad in fifty.

    Greedy and drawn, one choice and two, chats and completions; some with stop strings, a grammar, log-probabilities.
    """
    rng = Random(seed)
    return [_row(i, rng, tokens) for i in range(count)]


def _row(number: int, rng: Random, tokens: int) -> dict[str, Any]:
    text = f"{rng.choice(WORDS)} {rng.choice(WORDS)} {number % 7}"
    body: dict[str, Any] = {"model": "demo", "max_tokens": rng.randrange(tokens // 2, 2 * tokens), "ignore_eos": True}
    body |= rng.choice(({"temperature": 0}, {"temperature": 0.8}, {"temperature": 0.8, "n": 2}, {"temperature": 1.0}))
    body |= SPECIAL.get(number % 48, {})
    if number % 50 == 17:
        body["max_tokens"] = -1
    if number % 3:
        return _request(number, "/v1/completions", body | {"prompt": text})
    return _request(number, "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]})


def _request(number: int, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body}


def write_rows(path: Path, requests: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in requests))
    return path


class BatchProcess:
    """A running `squadron batch`. room: bytes until its disk is full; None = plenty. variables: environment.

    Each keeps a tally of the tokens that its replicas send, which `tallied` adds up.
    """

    def __init__(self, *arguments: str, home: Path, room: int | None = None, **variables: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SQUADRON_"))}
        kept = {"RAY_TMPDIR": os.environ["RAY_TMPDIR"]} if "RAY_TMPDIR" in os.environ else {}
        own = {"HOME": str(home), "HF_HUB_OFFLINE": "1", "SOURCE_DATE_EPOCH": CREATED}
        self.log = home / f"driver-{time.monotonic_ns()}.log"
        disk = "" if room is None else str(room)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-c", PROGRAM, str(STARTER)),
                    *(disk, str(self.log.with_suffix(".tally")), "batch", *arguments),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=clean | kept | own | variables,
            )
        self._seen: set[psutil.Process] = set()

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def descendants(self) -> list[psutil.Process]:
        if self.running:
            self._seen.update(psutil.Process(self.process.pid).children(recursive=True))
        return list(self._seen)

    def named(self, name: str) -> list[psutil.Process]:
        """Descendants that Ray has given a name, such as `ray::BatchReplica`."""
        return [one for one in self.descendants() if _name(one).startswith(f"ray::{name}")]

    def wait(self) -> int:
        return self.process.wait(END_SECONDS)

    def kill(self) -> None:
        """End the driver at once, and see to it that what it started ends by itself."""
        self.descendants()
        self.process.kill()
        self.process.wait()
        _, alive = psutil.wait_procs(self._seen, timeout=30)
        kill_all(alive)
        if alive:
            raise AssertionError(f"processes outlived their driver: {[_name(one) or one for one in alive]}")


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


def tallied(home: Path) -> tuple[int, int]:
    """Return how many tokens all drivers of `home` were sent, and how many were prefilled for them."""
    tallies = [TALLY.unpack(path.read_bytes()) for path in home.glob("driver-*.tally")]
    return sum(output for output, _ in tallies), sum(prefilled for _, prefilled in tallies)


def tear(folder: Path, rng: Random) -> int:
    """Cut up to 200 bytes off the file of results written last, as if the machine had died; return how many."""
    path = max(folder.glob("rows-*.log"))
    cut = min(rng.randrange(1, 200), path.stat().st_size)
    os.truncate(path, path.stat().st_size - cut)
    return cut


def until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()
