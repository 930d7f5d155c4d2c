"""Which requests may have killed replicas, and which of them have done so too often to be tried again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.router.replica_handle import LiveRequest, ReplicaHandle
from cluster.wire.link import ENGINE_DEAD, LOST, STALLED

PROBE_ROUNDS = 8  # rounds in which all suspects have had a turn on a replica without too many others of their kind


@dataclass(slots=True)
class _Record:
    """What speaks against a request since it last brought a token.

    deaths: lives (incarnations) of replicas that ended while they computed it. doubts: those that fell silent, or
    whose connection broke, and that may have ended: life -> the replica's id, and since when. alone: whether no other
    suspect may run beside it.
    """

    deaths: set[int] = field(default_factory=set)
    doubts: dict[int, tuple[str, float]] = field(default_factory=dict)
    alone: bool = False

    @property
    def weight(self) -> int:
        return len(self.deaths) + len(self.doubts)


class Blame:
    """Blames a replica's death on the requests that it computed, and that had brought no token there.

    What waited there, or decoded, is not blamed; neither is a request whose replica was damaged or took its leave.
    One that fell silent, or whose connection broke, has died once Serve knows it no more, or a later life of it is
    linked. Where several suspects ran together, their next attempts show which it was. Used by one router.

    needed: deaths after which a request is taken for their cause. doubt_time: seconds after which a lost replica is
    no longer taken for one that may have died. clock: seconds.
    """

    def __init__(self, needed: int, doubt_time: float, clock: Callable[[], float]) -> None:
        self._needed = needed
        self._doubt_time = doubt_time
        self._clock = clock
        self._records: dict[LiveRequest, _Record] = {}

    def deaths(self, live: LiveRequest) -> int:
        """Return how many replica deaths are blamed on the request."""
        record = self._records.get(live)
        return 0 if record is None else len(record.deaths)

    def is_guilty(self, live: LiveRequest) -> bool:
        """Whether the request must not be tried again."""
        return self.deaths(live) >= self._needed

    def is_suspect(self, live: LiveRequest) -> bool:
        """Whether one more death would make the request guilty."""
        record = self._records.get(live)
        return record is not None and record.weight >= self._needed - 1

    def awaits_word(self, live: LiveRequest) -> bool:
        """Whether the request is guilty if the replicas that were lost under it have died."""
        record = self._records.get(live)
        if record is None or not record.doubts:
            return False
        oldest = self._clock() - self._doubt_time
        record.doubts = {life: told for life, told in record.doubts.items() if told[1] > oldest}
        return record.weight >= self._needed

    def allows(self, replica: ReplicaHandle, live: LiveRequest) -> bool:
        """Whether a suspect may run on a replica beside those that run there.

        One at a time, unless there are so many that this would take for ever; and alone once several have failed.
        """
        if not replica.probes:
            return True
        if self._runs_alone(live) or any(map(self._runs_alone, replica.probes)):
            return False
        suspects = sum(map(self.is_suspect, self._records))
        return len(replica.probes) < -(-suspects // PROBE_ROUNDS)

    def link_ended(self, replica: ReplicaHandle, code: str) -> None:
        """Take note of the end of a replica's link, before what ran there is moved."""
        if code not in (ENGINE_DEAD, LOST, STALLED):
            return
        computed = [live for live in replica.live.values() if live.attempt is not None and live.attempt.is_computed]
        suspects = [live for live in computed if live in replica.probes]
        for live in computed:
            record = self._records.setdefault(live, _Record())
            if len(suspects) > 1 and live in replica.probes:
                record.alone = True
            elif code in (STALLED, LOST) and not replica.draining:  # of one that leaves Serve has said so already
                record.doubts[replica.incarnation] = replica.replica_id, self._clock()
            else:
                record.deaths.add(replica.incarnation)

    def is_alive(self, replica_id: str, incarnation: int) -> None:
        """Clear the requests that were blamed for this life's end, and take note that former lives have ended."""
        for record in self._records.values():
            record.deaths.discard(incarnation)
            record.doubts.pop(incarnation, None)
        self.has_gone(replica_id)

    def has_gone(self, replica_id: str) -> None:
        """Take note that a replica whose link is over has left for good: if it was lost before, it has died."""
        for record in self._records.values():
            died = [life for life, (name, _) in record.doubts.items() if name == replica_id]
            record.deaths.update(died)
            for life in died:
                del record.doubts[life]

    def forget(self, live: LiveRequest) -> None:
        """Drop the record of a request: it has brought a token, or has ended."""
        self._records.pop(live, None)

    def _runs_alone(self, live: LiveRequest) -> bool:
        record = self._records.get(live)
        return record is not None and record.alone
