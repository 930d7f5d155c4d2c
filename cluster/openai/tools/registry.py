"""Parsers by name: those of this package, and those that installed packages offer as entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from engine.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to factories. Further ones are registered as entry points of `group`, under names of their own.

    flag: the setting whose value the names are, for the errors.
    """

    def __init__(self, flag: str, group: str, own: Mapping[str, T]) -> None:
        self._flag = flag
        self._group = group
        self._own = dict(own)

    def names(self) -> tuple[str, ...]:
        """Return all names, sorted. Raises `ConfigError` when one is offered twice."""
        return tuple(sorted({*self._own, *self._offered()}))

    def get(self, name: str) -> T:
        """Return the factory of `name`; raises `ConfigError` that lists the known names."""
        offered = self._offered()
        if name in self._own:
            return self._own[name]
        if name not in offered:
            known = ", ".join(sorted({*self._own, *offered}))
            raise ConfigError(f"{self._flag}: there is no parser {name!r}; known: {known}", self._flag)
        try:
            factory: T = offered[name].load()
        except (ImportError, AttributeError) as error:
            where = offered[name].value
            raise ConfigError(f"{self._flag}: {name} ({where}) cannot be had: {error}", self._flag) from error
        return factory

    def _offered(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for entry in entry_points(group=self._group):
            if entry.name in self._own or found.setdefault(entry.name, entry).value != entry.value:
                raise ConfigError(
                    f"{self._flag}: {entry.value} is registered as {entry.name!r}, a name that is taken", self._flag
                )
        return found
