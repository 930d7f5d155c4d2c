"""Makes this process see what a bare GPU machine has installed, and nothing else: an import hook for subprocesses.

    python -m tests.bare_machine pytest tests/gpu

runs as `python -m pytest tests/gpu` would there.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from importlib.metadata import (
    Distribution,
    DistributionFinder,
    PackageNotFoundError,
    distribution,
    packages_distributions,
)
from typing import Any

from packaging.requirements import Requirement

INSTALLED = ("torch", "triton", "transformers", "safetensors", "tokenizers", "numpy", "pytest")
ABSENT = {"pydantic"}  # transformers brings it along only in later versions than such a machine may have
OURS = ("engine", "parallel", "cluster", "deploy", "tests")


class PresentOnly(DistributionFinder):
    """Python's finder of installed modules, which finds only what is there on the other machine."""

    def __init__(self, installed: set[str]) -> None:
        self._installed = installed
        self._absent = absent_modules(installed)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        absent = name.partition(".")[0] in self._absent
        return None if absent else PathFinder.find_spec(name, path, target)

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        found = PathFinder.find_distributions(context or DistributionFinder.Context())
        return (one for one in found if _plain(one.name) in self._installed)


def absent_modules(installed: set[str]) -> set[str]:
    """Return the top-level modules that other distributions brought along; this repository's are there."""
    owned = packages_distributions().items()
    theirs = {module for module, owners in owned if not any(_plain(owner) in installed for owner in owners)}
    return (theirs | ABSENT) - set(OURS)


def required(names: Sequence[str]) -> set[str]:
    """Return the distributions and, as far as they are installed, all that they require without extras."""
    found: set[str] = set()
    left = [_plain(name) for name in names]
    while left:
        name = left.pop()
        if name in found:
            continue
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        found.add(name)
        parsed = [Requirement(text) for text in needs]
        left += [_plain(one.name) for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Run a module as `python -m` would, with the rest of the machine hidden."""
    finder = PresentOnly(required(INSTALLED))
    built_in = [finder for finder in sys.meta_path if finder in (BuiltinImporter, FrozenImporter)]
    sys.meta_path[:] = [*built_in, finder]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
