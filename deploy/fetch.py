"""`python -m deploy.fetch MODEL...`: models are fetched and looked at before a pod's Ray starts.

A replica would do the same, but within the time that its start may take, in each rank, and again after each failure.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cluster.model_names import resolve_model
from engine.checkpoint import find_checkpoint, weight_files
from engine.errors import SquadronError
from engine.fingerprint import model_fingerprint


def fetch(model: str) -> Path:
    """Return the folder of a model, fetched from the hub if need be, with every weight file whole.

    Whole: there, if the index names it, and as long as its header says. Sums of the contents (`SHA256SUMS`) are
    compared by the replicas. Raises `CheckpointError` or `ConfigError`.
    """
    folder = find_checkpoint(resolve_model(model))
    model_fingerprint(str(folder), "")
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the models in order; return 0, or 1 after saying what is wrong with one."""
    parser = argparse.ArgumentParser(prog="python -m deploy.fetch", description="Fetch models and look at them.")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a folder, a hub id, or 'demo'")
    for model in parser.parse_args(arguments).models:
        began = time.monotonic()
        try:
            folder = fetch(model)
        except SquadronError as error:
            print(f"Error: {error}", file=sys.stderr)
            return 1
        size = sum((folder / name).stat().st_size for name in weight_files(folder))
        print(f"{model}: {size:,} bytes of weights in {folder}, {time.monotonic() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
