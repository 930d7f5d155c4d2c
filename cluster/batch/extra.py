"""Libraries that only some batches need; `pip install '.[data]'` brings them."""

from __future__ import annotations

import importlib
from typing import Any

from cluster.batch.errors import InputError


def extra_library(module: str, what: str) -> Any:
    """Import a library of the extra `data`. Raises `InputError` when it is missing; `what` needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
        remedy = "pip install '.[data]' in Squadron's folder"
        raise InputError(f"{what} needs {missing}, which is not here: {remedy}") from error
