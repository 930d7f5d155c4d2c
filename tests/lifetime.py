"""Nothing that tests start outlives them, also where they are ended by a signal."""

from __future__ import annotations

import signal
from types import FrameType

# For `python -c`: Linux sends the process SIGTERM when its parent dies (1 is PR_SET_PDEATHSIG of linux/prctl.h).
DIE_WITH_PARENT = f"import ctypes, sys; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, {signal.SIGTERM:d}); "


def end_in_good_order() -> None:
    """Have SIGTERM end pytest as Ctrl-C does, fixtures included. Ray, once started, makes it one test's failure."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
