"""What `make test` leaves to `make test-long`: cases that show a thing again, and most examples of properties."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

SHARE = 3  # `make test` tries one example in so many


def long(*values: Any) -> Any:
    """Return a case of `parametrize` that only `make test-long` runs."""
    return pytest.param(*values, marks=pytest.mark.long)


def examples(most: int) -> int:
    """Return `most` under `make test-long`, a third of it otherwise: how many examples a property is tried with."""
    return most if settings.get_current_profile_name() == "long" else -(-most // SHARE)
