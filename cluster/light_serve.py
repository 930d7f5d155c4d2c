"""Imports Ray Serve, but not pandas, of which Serve takes no more than a name where it is installed.

Serve would encode data frames that a deployment returns over HTTP, and no deployment here returns one. pandas takes a
third of the import, in every process. Ray imports this module in each worker (`RAY_preload_python_modules`, set by
`deploy.serve.environment`); whoever imports pandas later gets it.
"""

from __future__ import annotations

import sys

PANDAS = "pandas"

if PANDAS in sys.modules:
    import ray.serve
else:
    # What `import` finds as None is not there for it.
    sys.modules[PANDAS] = None  # type: ignore[assignment]
    try:
        import ray.serve  # noqa: F401
    finally:
        del sys.modules[PANDAS]
