"""Where replicas tell of their starts: Ray's control store, which outlives them and is reached from every node.

Where it fails, starts are not held back and not told of, and all else goes on.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from ray.util import list_named_actors

from cluster.lifecycle import control_store
from cluster.lifecycle.starts import StartRecord

logger = logging.getLogger(__name__)

KEPT_SECONDS = 900.0  # records of dead replicas
_DECODER = msgspec.msgpack.Decoder(StartRecord)


class StartRegister:
    """The records of one deployment of one app; `version` tells the settings apart that they were started with."""

    def __init__(self, app: str, deployment: str, version: str = "") -> None:
        self._all = f"{app}/{deployment}/"
        self._mine = f"{self._all}{version}/"

    def put(self, record: StartRecord) -> None:
        """Remember a record, instead of an earlier one of the same replica."""
        try:
            control_store.put(self._mine + record.replica_id, msgspec.msgpack.encode(record))
        except control_store.FAILURES as error:
            logger.warning("the start of replica %s is not recorded: %r", record.replica_id, error)

    def of_version(self) -> list[StartRecord]:
        """Return the records of this version."""
        return list(self._read(self._mine).values())

    def of_all_versions(self) -> list[StartRecord]:
        """Return the records of all versions."""
        return list(self._read(self._all).values())

    def prune(self, alive: set[str], now: float) -> None:
        """Forget what died long ago."""
        for key, record in self._read(self._all).items():
            if record.actor not in alive and now - record.since > KEPT_SECONDS:
                self._forget(key)

    def _forget(self, key: bytes) -> None:
        try:
            control_store.delete(key)
        except control_store.FAILURES as error:
            logger.warning("an old start stays on record: %r", error)

    def _read(self, prefix: str) -> Mapping[bytes, StartRecord]:
        found: dict[bytes, StartRecord] = {}
        try:
            for key in control_store.keys(prefix):
                value = control_store.get(key)
                if value is not None:
                    found[key] = _DECODER.decode(value)
        except control_store.FAILURES as error:
            logger.warning("earlier starts are not known: %r", error)
        return found


def living_actors() -> set[str] | None:
    """Return the names of all named actors that live, Serve's replicas among them; None where Ray does not say."""
    try:
        return {str(actor["name"]) for actor in list_named_actors(all_namespaces=True)}
    except control_store.FAILURES as error:
        logger.warning("it is not known which actors live: %r", error)
        return None


def version_of(settings: Mapping[str, Any]) -> str:
    """Return a few characters that tell settings apart."""
    return hashlib.blake2b(msgspec.json.encode(dict(sorted(settings.items()))), digest_size=4).hexdigest()
