"""Imports Ray Serve, but not pandas, of which Serve takes no more than a name where it is installed.

Serve would encode data frames that a deployment returns over HTTP, and no deployment here returns one. pandas takes a
third of the import, in every process. Ray imports this module in each worker (`RAY_preload_python_modules`, set by
`deploy.serve.environment`); whoever imports pandas later gets it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from engine.device.machine import collector_paused


@contextmanager
def _without(module: str) -> Iterator[None]:
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # what `import` takes for a module that is not installed
    try:
        yield
    finally:
        del sys.modules[module]


with collector_paused(), _without("pandas"):
    import ray.serve  # noqa: F401
