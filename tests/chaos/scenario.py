"""Scenarios of several nodes, each run in a process of its own that leaves nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

from deploy.cli.processes import descendants, kill_all


def run_scenario(begin: Callable[[], Coroutine[Any, Any, None]], folder: Path | None = None) -> NoReturn:
    """Run a scenario, print what it failed with, and end this process and all that were started here.

    Ray's own farewell would wait for the control store, so there is none. folder: removed in the end.
    """
    code = 1
    try:
        asyncio.run(begin())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        kill_all(descendants())
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        sys.stdout.flush()
        os._exit(code)
