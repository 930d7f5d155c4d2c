"""What a check says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


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
