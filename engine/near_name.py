"""Which known name was meant by one that is unknown: for "did you mean", which is better left out than wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

WORD_ALIKE = 0.75  # of `SequenceMatcher.ratio`: a letter of four, or two that changed places
NAME_ALIKE = 0.9  # the same of whole names, where a dash is missing or one too many
SHARED = 2 / 3  # of the known name's words that a shorter one must have
LEAST_LETTERS = 3  # of a word that another begins with: `len` is one for `length`
LEAST_WORDS = 2  # of it, too: one word alone, such as `max`, is in many names


def near_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is spelt nearly so, or has nearly all of its words and no others.

    Dashes and underscores are alike. None where there is none, or where several are equally near.
    """
    wanted = _words(name)
    near = [(_nearness(wanted, _words(one)), one) for one in known]
    most = max((nearness for nearness, _ in near), default=0.0)
    best = [one for nearness, one in near if nearness == most]
    return best[0] if most > 0 and len(best) == 1 else None


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_\s]+", name.lower()) if word]


def _nearness(wanted: Sequence[str], known: Sequence[str]) -> float:
    """Return 0 for another name, else a number that is higher for what is nearer, 1 for the same words."""
    if sorted(wanted) == sorted(known):
        return 1.0
    whole = _alike("-".join(wanted), "-".join(known))
    if len(wanted) == len(known):
        return whole if all(map(_are_near, wanted, known)) else 0.0
    if whole >= NAME_ALIKE:
        return whole
    share = len(wanted) / len(known)
    return share if set(wanted) < set(known) and len(wanted) >= LEAST_WORDS and share >= SHARED else 0.0


def _are_near(one: str, other: str) -> bool:
    short = min(one, other, key=len)
    abbreviated = len(short) >= LEAST_LETTERS and one.startswith(short) and other.startswith(short)
    return abbreviated or _alike(one, other) >= WORD_ALIKE


def _alike(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
