"""A start ends soon after Ctrl-C or SIGTERM at any moment, and when it hangs; nothing is left of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from uuid import uuid4

import psutil
import pytest

from tests.chaos.batch import write_rows
from tests.e2e.command import Command
from tests.e2e.harness import answers, eventually
from tests.e2e.ray_head import RayHead
from tests.long import long

pytestmark = pytest.mark.timeout(300)
SMALL = ("--device", "cpu", "--kv-cache-memory-bytes", str(64 * 2**20))
START = 12.0  # seconds, of which most pass before it is ready
MARK = "SQUADRON_TEST"
SECONDS = 20.0  # 5 on a machine with nothing else to do


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


class Marked(Command):
    """A command that is told to stop, and whose processes are known by their environment, whoever is their parent."""

    def __init__(self, *arguments: str, home: Path, **variables: str) -> None:
        self.mark = uuid4().hex
        super().__init__(*arguments, home=home, **{MARK: self.mark}, **variables)

    def stops(self, number: signal.Signals) -> int:
        """Send a signal as a terminal or a supervisor does; return the exit code once nothing is left."""
        (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)
        code = self.wait(SECONDS)
        eventually(lambda: not self._left(), "all that it started gone", SECONDS)
        return code

    def _left(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # of somebody else, or gone
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def moments(few: int, most: int) -> list[object]:
    """As many random moments and signals, `most` of them under `make test-long`."""
    rng = Random(most)
    drawn = [(rng.uniform(0.0, START), rng.choice((signal.SIGINT, signal.SIGTERM))) for _ in range(most)]
    return [pytest.param(*one) if number < few else long(*one) for number, one in enumerate(drawn)]


def stop_after(command: Marked, seconds: float, number: signal.Signals) -> None:
    try:
        time.sleep(seconds)
        assert command.process.poll() is None, command.text
        code = command.stops(number)
        assert code != 0 or "Ready" in command.text, command.text
    finally:
        command.kill()


@pytest.mark.parametrize(("seconds", "number"), moments(3, 20))
def test_serve_ends_at_any_moment(home: Path, seconds: float, number: signal.Signals) -> None:
    stop_after(Marked("serve", "demo", "--port", "0", *SMALL, home=home), seconds, number)


@pytest.mark.parametrize(("seconds", "number"), moments(1, 20))
def test_a_batch_ends_at_any_moment(home: Path, tmp_path: Path, seconds: float, number: signal.Signals) -> None:
    rows = [{"prompt": "import os", "max_tokens": 1000}] * 500
    write_rows(tmp_path / "rows.jsonl", rows)
    files = (str(tmp_path / "rows.jsonl"), str(tmp_path / "answers.jsonl"))
    stop_after(Marked("batch", *files, "--model", "demo", *SMALL, home=home), seconds, number)


@pytest.mark.parametrize(("seconds", "number"), moments(1, 20))
def test_the_demonstration_ends_at_any_moment(home: Path, seconds: float, number: signal.Signals) -> None:
    stop_after(Marked("demo-failover", home=home), seconds, number)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayHead]:
    with RayHead() as head:
        yield head


@pytest.mark.long
@pytest.mark.parametrize(("seconds", "number"), moments(20, 20))
def test_who_joins_a_cluster_ends_at_any_moment(
    home: Path, cluster: RayHead, seconds: float, number: signal.Signals
) -> None:
    variables = {"RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "disabled"}
    stop_after(Marked("serve", "demo", *SMALL, home=home, **variables), seconds, number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_ray_that_never_answers_its_driver_is_left_when_told_to(home: Path, number: signal.Signals) -> None:
    """As on a busy machine with Ray's own settings: its first workers miss their time, and it never answers."""
    slow = {"RAY_prestart_worker_first_driver": "1", "RAY_worker_register_timeout_seconds": "1"}
    command = Marked("serve", "demo", "--port", "0", *SMALL, home=home, **slow)
    try:
        eventually(lambda: stopped(command, "forked_workers"), "the process that forks workers", SECONDS)
        eventually(lambda: running(command, "raylet"), "Ray's node", SECONDS)
        time.sleep(8)
        assert "Ray  " not in command.text
        assert command.stops(number) != 0
    finally:
        command.kill()


def stopped(command: Marked, name: str) -> bool:
    """Suspend the processes of a command that have `name` in their command line; whether there is one."""
    told = answers(command.descendants(), psutil.Process.cmdline)
    found = [process for process, words in told if any(name in word for word in words[:3])]
    for process in found:
        process.suspend()
    return bool(found)


def running(command: Marked, name: str) -> bool:
    return any(found == name for _, found in answers(command.descendants(), psutil.Process.name))
