"""This repository's engine beside the other engines that run on a CPU: `python -m tests.bench.peers --help`."""

from __future__ import annotations

import sys


def measure() -> dict[str, float]:
    """Return the figures of one round for `make bench`; transformers is in `offline`. Says what is skipped."""
    from tests.bench.peers.comparison import compare
    from tests.bench.peers.engines import ENGINES, OURS
    from tests.bench.peers.environments import default_root
    from tests.bench.peers.table import figures

    engines = [engine for engine in ENGINES.values() if engine.environment or engine.name == OURS]
    found = compare(default_root(), engines=engines)
    for name, why in found.skipped.items():
        print(f"peers: {name} is skipped: {why}", file=sys.stderr)
    return figures(found)
