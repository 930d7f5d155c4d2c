"""What no token depends on, such as figures and spans: a fault in it is told, and harms nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from engine.telemetry.wordless import wordless

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


class Aside:
    """Does such things for one replica. What fails is logged once: a line for each step would hide all else."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def do(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what `act` returns, None where it fails."""
        try:
            return act(*args, **kwargs)
        except Exception as error:
            name = getattr(act, "__qualname__", repr(act))
            if name not in self._told:
                self._told.add(name)
                logger.error("%s failed, which is not told again; all else goes on", name, exc_info=wordless(error))
            return None
