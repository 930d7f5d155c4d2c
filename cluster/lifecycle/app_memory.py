"""What is remembered of an app beyond its copies: the version that was whole, and the update that was undone."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from cluster.lifecycle import control_store
from cluster.lifecycle.rollback import GoodVersion, Undone

T = TypeVar("T", bound=msgspec.Struct)


class AppMemory:
    """The memory of the app `app`, read from and written to Ray's control store at each use.

    Raises one of `control_store.FAILURES` where that cannot be reached.
    """

    def __init__(self, app: str) -> None:
        # No app can have this name, which keeps records of starts (`app/deployment/...`) apart.
        self._prefix = f"/{app}/"

    @property
    def good(self) -> GoodVersion | None:
        """The last version with which the app was whole."""
        return self._get("good", GoodVersion)

    @good.setter
    def good(self, version: GoodVersion | None) -> None:
        self._put("good", version)

    @property
    def undone(self) -> Undone | None:
        """The last update that was undone, if no other version has been whole since."""
        return self._get("undone", Undone)

    @undone.setter
    def undone(self, undone: Undone | None) -> None:
        self._put("undone", undone)

    @property
    def seen(self) -> float:
        """Seconds since the epoch at which the app was known to be there; 0 = never."""
        value = control_store.get(self._prefix + "seen")
        return 0.0 if value is None else float(value)

    @seen.setter
    def seen(self, at: float) -> None:
        control_store.put(self._prefix + "seen", str(at).encode())

    def is_first(self, deployment: str, version: str, who: str) -> bool:
        """Return whether nobody but `who` has asked this before of the deployment in this version."""
        asked = f"{self._prefix}first/{deployment}/"
        first = control_store.create(asked + version, who.encode())
        for key in control_store.keys(asked):
            if first and key != (asked + version).encode():
                control_store.delete(key)
        return first

    def forget(self) -> None:
        """Forget all of it."""
        for key in control_store.keys(self._prefix):
            control_store.delete(key)

    def _get(self, name: str, kind: type[T]) -> T | None:
        value = control_store.get(self._prefix + name)
        return None if value is None else msgspec.json.decode(value, type=kind)

    def _put(self, name: str, record: msgspec.Struct | None) -> None:
        if record is None:
            control_store.delete(self._prefix + name)
        else:
            control_store.put(self._prefix + name, msgspec.json.encode(record))
