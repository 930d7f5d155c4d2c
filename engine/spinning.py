"""Imported before torch: OpenMP's threads spin for a moment where they wait, then sleep.

Where another process shares the cores, a thread that spins keeps its core from the one that it waits for. libgomp
reads its variables when it is loaded, so that nothing can be done once torch is; a choice of the user's stands.
Processes that this one starts have it, too.
"""

from __future__ import annotations

import os
import sys

from engine.device.machine import SPIN

if "torch" not in sys.modules and not any(name in os.environ for name in (*SPIN, "OMP_WAIT_POLICY")):
    os.environ.update(SPIN)
