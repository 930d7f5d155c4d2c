"""Why a replica could not start, said so that it survives Serve's status text and Ray's tracebacks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.errors import ConfigError

_LINE = re.compile(r"^\S*ReplicaStartError: squadron: (?P<kind>\w+): (?P<flag>\w*): (?P<message>.*)$", re.MULTILINE)


class ReplicaStartError(RuntimeError):
    """Raised by a replica's constructor; its text is the one line `squadron: KIND: FLAG: MESSAGE`.

    FLAG is the setting that mends it, empty where the error names none. Starting again would fail in the same way.
    """

    @classmethod
    def of(cls, error: Exception, model: str = "") -> ReplicaStartError:
        """Wrap an error of the engine (`ConfigError`, `CheckpointError`, `ShardingError`, ...).

        model: which could not start, where there are several.
        """
        flag = error.flag if isinstance(error, ConfigError) else ""
        message = " ".join(f"model {model}: {error}".split() if model else str(error).split())
        return cls(f"squadron: {type(error).__name__}: {flag}: {message}")


@dataclass(frozen=True, slots=True)
class StartFailure:
    """What a `ReplicaStartError` said: the kind of error, the setting (may be empty), one sentence."""

    kind: str
    flag: str
    message: str


def find_start_failure(status: str) -> StartFailure | None:
    """Find the line of a `ReplicaStartError` in Serve's status message, which is a whole traceback."""
    found = _LINE.search(status)
    return StartFailure(found["kind"], found["flag"], found["message"].strip()) if found else None
