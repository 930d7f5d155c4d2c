"""What a replica's prefix cache holds, by block key, for routers that come later."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from cluster.wire.translation import block_key
from engine.report import BlockEvents

SNAPSHOT_BLOCKS = 8192  # keys in one message
Changes = tuple[list[int], list[int], bool]  # (stored, removed, cleared), as in `BlockUpdate`


class CachedBlocks:
    """Follows the engine's block events."""

    def __init__(self) -> None:
        self._keys: dict[int, None] = {}  # in order of storing

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, events: BlockEvents) -> Changes | None:
        """Take in one step's events and return them as they travel, or None if there are none."""
        if not (events.stored or events.removed or events.cleared):
            return None
        stored, removed = list(map(block_key, events.stored)), list(map(block_key, events.removed))
        if events.cleared:
            self._keys.clear()
        for key in removed:
            self._keys.pop(key, None)
        self._keys.update(dict.fromkeys(stored))
        return stored, removed, events.cleared

    def snapshot(self) -> Iterator[Changes]:
        """Return all that is cached, as changes that begin with forgetting; at least one."""
        keys = iter(list(self._keys))
        yield list(islice(keys, SNAPSHOT_BLOCKS)), [], True
        while chunk := list(islice(keys, SNAPSHOT_BLOCKS)):
            yield chunk, [], False
