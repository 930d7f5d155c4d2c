"""What a batch may have under way: all that the replicas take, or what clients' requests leave."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.admission.room import Room, RoomConfig
from cluster.router.dispatcher import Dispatcher

QUIET_SECONDS = 1.0  # without a sequence of others, after which nobody else is there


def whole_room(dispatcher: Dispatcher, max_num_seqs: int, max_num_batched_tokens: int) -> Room:
    """Return bounds that keep the replicas full. max_num_seqs, max_num_batched_tokens: of one replica's step."""
    sizes = RoomConfig(max_num_seqs, max_num_batched_tokens)
    return Room(sizes, dispatcher.room, dispatcher.counters.outcomes.total)


class Filler:
    """Bounds of a batch behind clients: all of `room` while nobody else asks, else a `share` of it, 0 to 1.

    Others are what the replicas tell of requests beside those of `dispatcher`, which is the batch's own. Between two
    requests of theirs nothing is taken back at once: what is recalled has its prompt computed again.
    """

    def __init__(
        self, room: Room, dispatcher: Dispatcher, share: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._room = room
        self._dispatcher = dispatcher
        self._share = share
        self._clock = clock
        self._last_other = float("-inf")

    def sequences(self) -> int:
        """Return the most sequences; at least one, so that a batch always gets on."""
        most = self._room.sequences()
        return max(1, int(self._share * most)) if self._others() else most

    def tokens(self) -> int:
        """Return the most tokens."""
        most = self._room.tokens()
        return max(1, int(self._share * most)) if self._others() else most

    def _others(self) -> bool:
        now = self._clock()
        if self._dispatcher.num_of_others > 0:
            self._last_other = now
        return now - self._last_other < QUIET_SECONDS
