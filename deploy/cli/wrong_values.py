"""What to write in place of a value, or of a flag, that the parser of command lines refuses."""

from __future__ import annotations

import re
from collections.abc import Collection
from math import isfinite
from typing import Any

import typer
from pydantic import ValidationError

from engine.short_numbers import short_number

# By how pydantic's type of the error begins: what is wanted, and one that most flags take.
KINDS = {"int": ("whole number", "8"), "float": ("number", "0.5")}
DURATION = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(ms|s|sec|seconds?|m|min|minutes?)\s*")
THOUSANDS = re.compile(r"[0-9]{1,3}(,[0-9]{3})+")
EXACT = 1e15  # below which a float holds every whole number
UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}
ADDRESS = ("--port", "--host")


def say_what_works(error: Exception) -> None:
    """Change the text of one of typer's errors, where it is about a number or about a server's address."""
    if isinstance(error, typer.BadParameter) and isinstance(error.__cause__, ValidationError):
        first = error.__cause__.errors()[0]
        kind = str(first["type"]).partition("_")[0]
        if kind in KINDS:
            wanted, usual = KINDS[kind]
            said = str(first["input"])
            works = _meant(said, wanted) or f"one such as {_default(error.param) or usual}"
            error.message = f"{said!r} is no {wanted}; write {works}"
    # Typer exports no class for unknown options; this attribute is what tells them from other errors.
    elif getattr(error, "option_name", None) in ADDRESS and "--url" in _flags_of(error):
        option = error.option_name  # type: ignore[attr-defined]  # see above
        error.message = (  # type: ignore[attr-defined]
            f"No such option: {option}. Give the server's address as --url, such as http://127.0.0.1:8000."
        )
        error.possibilities = None  # type: ignore[attr-defined]


def without_value(option: str, own: Collection[str]) -> str:
    """Return what to say of a flag that was given a value and takes none. own: the command's flags."""
    negative = f"--no-{option.removeprefix('--')}"
    either = f", or {negative} for the contrary" if negative in own else ""
    return f"{option} takes no value: write {option} alone{either}."


def seconds(text: str) -> float:
    """Return the seconds that a flag says. Raises `typer.BadParameter` with how to write them."""
    try:
        return float(text)
    except ValueError:
        works = _in_seconds(text) or "a number such as 0.5"
        raise typer.BadParameter(f"{text!r} is no number of seconds; write {works}") from None


def _in_seconds(text: str) -> str | None:
    found = DURATION.fullmatch(text)
    if found is None:
        return None
    unit = found[2] if found[2] == "ms" else found[2][0]
    return f"{float(found[1]) * UNITS[unit]:g}"


def _meant(text: str, wanted: str) -> str | None:
    """Return a number as this parser takes it, of one that is written as 1e3, 1,024, 1k, 0,9, 90% or 5m."""
    if wanted == "number" and text.endswith("%"):
        return _meant_share(text[:-1])
    plain = text.replace(",", "") if THOUSANDS.fullmatch(text) else text.replace(",", ".")
    try:
        number = float(plain if wanted == "number" else short_number(plain))
    except ValueError:
        return _in_seconds(text) if wanted == "number" else None
    if wanted == "number":
        return f"{number:g}" if isfinite(number) else None
    return f"{number:.0f}" if abs(number) < EXACT and number.is_integer() else None


def _meant_share(percent: str) -> str | None:
    try:
        return f"{float(percent) / 100:g}"
    except ValueError:
        return None


def _default(param: Any) -> str | None:
    """Return the default, which the help of a setting tells, as it is to be written."""
    default = getattr(param, "default", None)
    if isinstance(default, int | float):
        return str(default)
    found = re.search(r"\(default: ([0-9][0-9.,]*)\)", getattr(param, "help", None) or "")
    return None if found is None else found[1].replace(",", "")


def _flags_of(error: Exception) -> list[str]:
    context = getattr(error, "ctx", None)
    return [] if context is None else [name for param in context.command.params for name in param.opts]
