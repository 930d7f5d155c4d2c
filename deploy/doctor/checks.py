"""What a check is and says. Checks run side by side, in bounded time; libraries are asked in their own processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any


class Level(StrEnum):
    """How a thing is: as it should be; worth knowing; to be mended before serving."""

    OK = "ok"
    WARNING = "warning"
    FIX = "fix"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor. remedy: what to do, empty where nothing need be done."""

    check: str
    level: Level
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    """Return that all is well."""
    return Finding(check, Level.OK, text)


def warning(check: str, text: str, remedy: str) -> Finding:
    """Return what may become trouble."""
    return Finding(check, Level.WARNING, text, remedy)


def fix(check: str, text: str, remedy: str) -> Finding:
    """Return what keeps Squadron from serving, or from serving well."""
    return Finding(check, Level.FIX, text, remedy)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 where something must be mended, else 0."""
    return int(any(finding.level is Level.FIX for finding in findings))


@dataclass(frozen=True, slots=True)
class Check:
    """One check. run: returns its findings; seconds: after which it counts as hung."""

    name: str
    run: Callable[[], Sequence[Finding]]
    seconds: float = 30.0


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """Yield the findings of all checks in their order; takes as long as the slowest, never longer than its limit."""
    began = time.monotonic()
    answers = [_started(check) for check in checks]
    for check, answer in zip(checks, answers, strict=True):
        left = began + check.seconds - time.monotonic()
        try:
            yield from answer.get(timeout=max(left, 0.0))
        except Empty:
            yield fix(
                check.name,
                f"no answer within {check.seconds:g} s",
                "something that it asks hangs: a disk, a driver, or the network",
            )


def _started(check: Check) -> SimpleQueue[Sequence[Finding]]:
    """Return where the findings will be put. The thread is left behind when it hangs."""
    answer: SimpleQueue[Sequence[Finding]] = SimpleQueue()
    Thread(target=lambda: answer.put(_findings(check)), name=f"doctor-{check.name}", daemon=True).start()
    return answer


def _findings(check: Check) -> Sequence[Finding]:
    try:
        return check.run()
    # An error in one check becomes a line of the report, because the other checks still help.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
        return [
            warning(check.name, f"could not be checked ({reason})", "see whether the cause is told by another line")
        ]


PROBES = Path(__file__).with_name("probes")


class ProbeError(Exception):
    """A probe did not answer; the text says in a few words what became of it."""


def ask(name: str, *arguments: str, seconds: float, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what the script `probes/<name>.py` prints as JSON.

    environment: all of its variables, None = this process's. Raises `ProbeError`.
    """
    # -P: neither the script's folder nor the working directory may shadow a library.
    command = [sys.executable, "-P", str(PROBES / f"{name}.py"), *arguments]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {seconds:g} s") from None
    except OSError as error:
        raise ProbeError(f"python cannot be started: {error}") from error
    return _answer(run)


def _answer(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    last = run.stdout.strip().splitlines()[-1:] or [""]
    try:
        answer = json.loads(last[0])
    except ValueError:
        answer = None
    if isinstance(answer, dict):
        return answer
    if run.returncode < 0:
        raise ProbeError(f"killed by signal {-run.returncode}")
    words = run.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    raise ProbeError(f"ended with {run.returncode}: {words[0][:300]}")
