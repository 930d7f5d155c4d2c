"""`promtool`, which comes with Prometheus: Debian's package `prometheus` has both."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REASON = "there is no promtool here: install Prometheus (on Debian `apt-get install prometheus`)"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason=REASON)


def promtool(*arguments: str | Path) -> str:
    """Run it and return what it says; fails with that where it does not like what it was given."""
    command = [shutil.which("promtool") or "promtool", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    return said
