"""A `squadron` command as a process of its own, started and stopped as a person does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Collection
from pathlib import Path

import psutil

from deploy.cli.processes import kill_all
from tests.e2e.harness import answers, eventually
from tests.lifetime import DIE_WITH_PARENT

PROGRAM = DIE_WITH_PARENT + "from deploy.main import main; main()"
START_SECONDS = 240.0  # beside another server that starts, on two cores that others use too
EXIT_SECONDS = 40.0
LEAK_SECONDS = 10.0


def wait_gone(started: Collection[psutil.Process]) -> None:
    """Wait until processes have ended.

    One that its new parent has not waited for yet has: a Ray that a test started in this process made this one the
    parent of all that are orphaned.
    """

    def gone() -> bool:
        running = answers(started, lambda one: one.is_running() and one.status() != psutil.STATUS_ZOMBIE)
        return not any(runs for _, runs in running)

    eventually(gone, "all processes gone", LEAK_SECONDS)


class Command:
    """A running `squadron` in a process group of its own, so that Ctrl-C reaches it as a terminal sends it.

    folder: where it runs, which is also where its code is looked for first; None = here.
    """

    def __init__(self, *arguments: str, home: Path, folder: Path | None = None, **variables: str) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SQUADRON_"))
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=folder,
            env=environment | {"HOME": str(home), "HF_HUB_OFFLINE": "1", **variables},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_for(self, words: str) -> None:
        def shown() -> bool:
            return words in self.text or self.process.poll() is not None

        try:
            eventually(shown, f"{words!r} in the output", START_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text}") from None
        assert words in self.text, self.text

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def ctrl_c(self) -> int:
        os.killpg(self.process.pid, signal.SIGINT)
        return self.wait()

    def wait(self, timeout: float = EXIT_SECONDS) -> int:
        code = self.process.wait(timeout)
        self._reader.join()
        return code

    def kill(self) -> None:
        """End everything, whatever state the test left it in."""
        if self.process.poll() is None:
            kill_all([*self.descendants(), psutil.Process(self.process.pid)])
        self.wait()
        self.process.stdout.close()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)


def url_of(command: Command) -> str:
    """The address that the command printed."""
    return re.search(r"http://127\.0\.0\.1:\d+", command.text)[0]
