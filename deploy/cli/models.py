"""`squadron models`: which architectures are served, and what each of them can."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version

from rich.console import Console
from rich.table import Column, Table

from engine.errors import ConfigError
from engine.models.facts import Facts, native_facts, transformers_facts

COLUMNS = ("architecture", "attention", "experts", "TP", "EP", "quantised")


def show_models(words: Sequence[str], everything: bool, as_json: bool) -> None:
    """Print the families, or those whose architecture or model type holds one of `words`.

    everything: also the decoders of transformers that have no family. Raises `ConfigError` where there is none.
    """
    known = (*native_facts(), *transformers_facts())
    found = [one for one in known if _holds(one, words) and (everything or words or one.implementation == "native")]
    if not found:
        raise ConfigError(
            f"models: no architecture or model_type has {' or '.join(words)!r} in its name; "
            "`squadron models --all` lists what there is",
            "models",
        )
    if as_json:
        print(json.dumps([asdict(one) for one in found]))
        return
    console = Console(highlight=False)
    others = sum(one.implementation == "transformers" for one in known)
    console.print(table(found))
    console.print(
        f"{others} more decoders of transformers {version('transformers')} have no family here. Most of those that "
        "keep no recurrent state are served over this engine's cache (--model-impl transformers): the start says of "
        "a checkpoint why not."
    )


def table(facts: Iterable[Facts]) -> Table:
    """Return a row for each architecture; they fit into 80 columns."""
    rows = Table(*(Column(name, no_wrap=True) for name in COLUMNS), box=None, pad_edge=False)
    for one in facts:
        rows.add_row(*cells(one))
    return rows


def cells(one: Facts) -> tuple[str, ...]:
    """Return what the columns say of one architecture."""
    if one.implementation == "transformers":
        return one.architecture, "transformers", "", "by plan" if one.tensor_parallel else "no", "no", "no"
    return (
        one.architecture,
        ", ".join(one.attention),
        _word(one.experts),
        _word(one.tensor_parallel),
        _word(one.expert_parallel),
        ", ".join(one.quantization) or "no",
    )


def _holds(one: Facts, words: Sequence[str]) -> bool:
    names = [name.lower() for name in (one.architecture, *one.model_types)]
    return not words or any(word.lower() in name for word in words for name in names)


def _word(true: bool) -> str:
    return "yes" if true else "no"
