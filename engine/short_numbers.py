"""Numbers of tokens and bytes as people write them: 32k, 32K."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

# Source: vLLM's `human_readable_int`, whose small letters are powers of 1000 and whose capitals are powers of 1024.
SHORT_NUMBER = re.compile(r"(\d+)(\.\d+)?([kmgtKMGT])")
POWERS = "kmgt"


def short_number(value: Any) -> Any:
    """Return the number that a text such as 32k (32,000), 1.5k (1,500) or 32K (32,768) means; all else as it is."""
    found = SHORT_NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return value
    whole, part, letter = found.groups()
    power = POWERS.index(letter.lower()) + 1
    if letter.islower():
        exact = Decimal(whole + (part or "")) * 1000**power
        return int(exact)
    if part:
        raise ValueError(
            f"must be whole before {letter}, a power of 1024, such as {whole}{letter}; {letter.lower()} takes parts"
        )
    return int(whole) * 1024**power


def context_length(value: Any) -> Any:
    """Return a number as `short_number` does, None for vLLM's `auto` and -1: the model's own limit, or what fits."""
    return None if value in ("auto", "-1", -1) else short_number(value)
