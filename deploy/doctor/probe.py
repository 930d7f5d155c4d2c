"""Asks a library in a process of its own: one that hangs or crashes there does no harm here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
