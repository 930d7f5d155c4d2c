"""`python -m deploy.fetch MODEL... --tokenizer NAME`: fetches and checks models before a pod's Ray starts.

A replica would do the same, but within the time that its start may take, in each rank, and again after each failure.
Pods name a file that lists what to fetch (`--list`): a name in the pod itself would make a model more another pod.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cluster.model_names import resolve_model
from engine.errors import ConfigError, SquadronError
from engine.loader.checkpoint import find_checkpoint, weight_files
from engine.loader.fingerprint import model_fingerprint
from engine.text.tokenizer import load_tokenizer


def fetch(model: str) -> Path:
    """Return the folder of a model, fetched from the hub if need be, with every weight file whole.

    Whole: there, if the index names it, and as long as its header says. Sums of the contents (`SHA256SUMS`) are
    compared by the replicas. Raises `CheckpointError` or `ConfigError`.
    """
    folder = find_checkpoint(resolve_model(model))
    model_fingerprint(str(folder), "")
    return folder


def fetch_tokenizer(name: str) -> None:
    """Fetch a tokenizer that is not its model's own, and read it as routers will. Raises `CheckpointError`."""
    load_tokenizer(name)


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file lists to be fetched."""

    models: list[str] = []
    tokenizers: list[str] = []


def read_list(file: Path) -> Wanted:
    """Return what `file` lists. Raises `ConfigError` where it cannot be read or is something else."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Wanted)
    except OSError as error:
        raise ConfigError(f"--list: {file} cannot be read: {error.strerror}; give a file of JSON", "list") from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f'--list: {file} must be JSON such as {{"models": ["demo"], "tokenizers": []}}: {error}', "list"
        ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch tokenizers and models in order; return 0, or 1 after saying what is wrong with one."""
    parser = argparse.ArgumentParser(prog="python -m deploy.fetch", description="Fetch models and check their files.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a folder, a hub id, or 'demo'")
    help_text = "one that a model has in place of its own: a folder or a hub id; can be given several times"
    parser.add_argument("--tokenizer", action="append", default=[], metavar="NAME", help=help_text)
    list_help = 'a file of JSON with more: {"models": ["MODEL"], "tokenizers": ["NAME"]}'
    parser.add_argument("--list", type=Path, metavar="FILE", help=list_help)
    given = parser.parse_args(arguments)
    if not given.models and given.list is None:
        parser.error("MODEL: give at least one, such as demo, or --list FILE")
    try:
        listed = Wanted() if given.list is None else read_list(given.list)
        for name in (*given.tokenizer, *listed.tokenizers):
            fetch_tokenizer(name)
            print(f"{name}: the tokenizer is there", flush=True)
        for model in (*given.models, *listed.models):
            _fetch_and_print(model)
    except SquadronError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def _fetch_and_print(model: str) -> None:
    began = time.monotonic()
    folder = fetch(model)
    size = sum((folder / name).stat().st_size for name in weight_files(folder))
    print(f"{model}: {size:,} bytes of weights in {folder}, {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
