"""What can be measured, told before it is: figures, and the parts of the bench that measure them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.bench.gpu.limits import Limits


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the results.

    name: `part/...`, unique. limit: what the hardware allows, in `unit`, from its rates. aim: what we want, in words.
    higher: whether more is better.
    """

    name: str
    what: str
    unit: str
    limit: Callable[[Limits], float] | None = None
    aim: str = ""
    higher: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """Figures that are measured together, in a process of their own on a GPU.

    run: measures them through the `Bench` it is given.
    """

    name: str
    title: str
    figures: tuple[Figure, ...]
    run: Callable[..., None]


def chosen(parts: Sequence[Part], wanted: Sequence[str]) -> list[Part]:
    """Return the parts that are wanted: by name or its beginning, all where nothing is. Raises `ValueError`."""
    for name in wanted:
        if not any(part.name.startswith(name) for part in parts):
            known = ", ".join(part.name for part in parts)
            raise ValueError(f"--only {name}: there is no such part; known: {known}")
    return [part for part in parts if not wanted or part.name.startswith(tuple(wanted))]
