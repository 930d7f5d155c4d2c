"""Runs one client's script and says what came of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.clients.catalogue import SCRIPTS, Client
from tests.clients.install import NotInstallableError, command, install

SCRIPT_TIMEOUT = 1200.0  # seconds; what makes load starts processes that import torch, which takes most of it


class Outcome(StrEnum):
    """What the table says of a client."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_INSTALLABLE = "not installable"


@dataclass(frozen=True, slots=True)
class Result:
    """checks: that passed, in their order. reason: of each that did not, or why there was none to pass."""

    client: Client
    outcome: Outcome
    checks: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Server:
    """Where the server is, which model is asked, with which key, and where the model's tokenizer is."""

    url: str
    model: str
    key: str = "none"
    tokenizer: str = ""

    def flags(self) -> list[str]:
        """Return the command line of a script."""
        return ["--url", self.url, "--model", self.model, "--key", self.key, "--tokenizer", self.tokenizer]


def try_client(client: Client, server: Server, cache: Path, scripts: Path = SCRIPTS) -> Result:
    """Install a client and run its script."""
    try:
        folder = install(client, cache)
    except NotInstallableError as error:
        return Result(client, Outcome.NOT_INSTALLABLE, reason=str(error))
    return run_script(client, [*command(client, folder, scripts), *server.flags()])


def run_script(client: Client, arguments: Sequence[str], timeout: float = SCRIPT_TIMEOUT) -> Result:
    """Run a script; it passes if it ends well and told of every check that it has in the catalogue."""
    # Nothing of this interpreter's: neither our packages nor proxies, which would be asked for the loopback.
    kept = {name: value for name, value in os.environ.items() if not _is_ours(name)}
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout, env=kept, check=False)
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return Result(client, Outcome.FAILED, _told(said, "ok"), f"not done after {timeout:g} s")
    passed, failed = _told(done.stdout, "ok"), _told(done.stdout, "FAILED")
    missing = [name for name in client.checks if name not in passed and not _names(failed, name)]
    reasons = [*failed]
    if missing and not failed:
        reasons.append(f"did not run: {', '.join(missing)}")
    if done.returncode and not failed:
        reasons.append((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    outcome = Outcome.FAILED if reasons or missing else Outcome.PASSED
    return Result(client, outcome, passed, "\n".join(reasons))


def _is_ours(name: str) -> bool:
    return name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV") or name.lower().endswith("_proxy")


def _told(output: str, word: str) -> tuple[str, ...]:
    return tuple(line.removeprefix(f"{word} ") for line in output.splitlines() if line.startswith(f"{word} "))


def _names(failed: Sequence[str], check: str) -> bool:
    return any(line.startswith(f"{check}:") for line in failed)
