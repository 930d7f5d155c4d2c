"""Runs histories with the small tokenizer of the tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.openai.served_model import ServedModel
from cluster.simulator import world
from cluster.simulator.history import History
from cluster.simulator.lives import CONTEXT
from cluster.simulator.world import Outcome
from tests.openai_app import served_model


@cache
def demo_model() -> ServedModel:
    """Return the model that routers serve, with a small tokenizer."""
    with TemporaryDirectory() as folder:
        return served_model(Path(folder), max_model_len=CONTEXT)


def run(history: History, record: str | None = None) -> Outcome:
    """Run a history and return what came of it. record: folder where routers record their incidents."""
    return world.run(history, record, demo_model() if history.ingress else None)
