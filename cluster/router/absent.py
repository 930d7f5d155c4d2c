"""Replicas that a router has lost: those that fell silent may be found again, others may come for those that died."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.router.member import LiveRequest, Member
from cluster.wire.link import ENGINE_DEAD, LOST, STALLED

GATHER_TIME = 2.0  # seconds
SILENT_WAIT = 15.0  # seconds for which one that fell silent counts as there, though nobody reaches it


@dataclass(frozen=True, slots=True)
class _Silent:
    until: float
    kv_tokens: int
    fingerprint: str


class Absent:
    """By replica id, until it is found again, another has come for it, or it is not waited for any more.

    Where all were lost, those that come back share what waits: for `GATHER_TIME` after each none is given more than
    its part, so that the first does not run what the others could a moment later.

    return_time: seconds for which one is expected back, or another in its place.
    """

    def __init__(self, return_time: float) -> None:
        self._silent: dict[str, _Silent] = {}
        self._expected: dict[str, float] = {}  # until when
        self._return_time = return_time
        self._gathers_until = float("-inf")

    def lost(self, member: Member, code: str, now: float) -> None:
        """Take note that a replica's link is over."""
        if code in (STALLED, ENGINE_DEAD, LOST):
            self._expected[member.replica_id] = now + self._return_time
        if code == STALLED:
            self._silent[member.replica_id] = _Silent(now + SILENT_WAIT, member.kv_tokens, member.fingerprint)

    def found(self, replica_id: str, others: bool, now: float) -> float | None:
        """Take note that a replica has a link: one that was lost, or another. others: whether it is not the only one.

        Returns until when what waits is shared among those that come back, None where it is not.
        """
        self._silent.pop(replica_id, None)
        if not self._num_expected(now):
            return None
        self._expected.pop(replica_id if replica_id in self._expected else next(iter(self._expected)))
        if others and now >= self._gathers_until:
            return None
        self._gathers_until = now + GATHER_TIME
        return self._gathers_until

    def has_left(self, replica_id: str) -> None:
        """Take note that a replica will not be found again."""
        self._silent.pop(replica_id, None)

    def spare(self, pool: list[Member], present: list[Member], num_waiting: int, now: float) -> list[Member]:
        """Return those of `pool` that may have one of `num_waiting` requests that wait. present: all there are."""
        if now >= self._gathers_until:
            return pool
        total = num_waiting + sum([len(member.live) for member in present])
        share = -(-total // (len(present) + self._num_expected(now)))
        return [member for member in pool if len(member.live) < share]

    def _num_expected(self, now: float) -> int:
        self._expected = {name: until for name, until in self._expected.items() if until > now}
        return len(self._expected)

    def silent_until(self, live: LiveRequest, now: float) -> float:
        """Return how long `live` should wait for those that fell silent; long past where none is waited for."""
        model, past = live.log.fingerprint, float("-inf")
        return max((one.until for one in self._present(now) if model in (None, one.fingerprint)), default=past)

    def kv_tokens(self, now: float) -> list[int]:
        """Return the tokens of each one's KV cache."""
        return [one.kv_tokens for one in self._present(now)]

    def _present(self, now: float) -> list[_Silent]:
        self._silent = {name: one for name, one in self._silent.items() if one.until > now}
        return list(self._silent.values())
