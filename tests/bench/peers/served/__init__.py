"""`squadron serve` beside other servers on the same machine: `python -m tests.bench.peers.served --help`."""

from __future__ import annotations

import sys


def measure() -> dict[str, float]:
    """Return the figures of one round of one replica for `make bench`. Says what is skipped."""
    from tests.bench.peers.environments import default_root
    from tests.bench.peers.served.comparison import compare
    from tests.bench.peers.served.table import figures

    found = compare(default_root(), streams=(1, 32), replicas=(1,))
    for name, why in found.skipped.items():
        print(f"peers.served: {name} is skipped: {why}", file=sys.stderr)
    return figures(found)
