"""The policy that keeps a conversation on one replica: consistent hashing with bounded loads.

Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2017).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from random import Random

from cluster.errors import ApiError
from cluster.router.routing.candidate import C, PolicyConfig, Query
from cluster.router.routing.kv_aware import kv_aware

HEADER = "x-session-id"
POINTS = 64  # places of one replica on the ring: loads differ by some 12 % with so many
_SESSION = re.compile(r"[\x21-\x7e]{1,256}")


def checked_session(value: str) -> str:
    """Return what a client sent as `x-session-id` ("" = nothing); raises `ApiError` for what is none."""
    if value and not _SESSION.fullmatch(value):
        message = f"{HEADER} must be 1 to 256 printable ASCII characters without spaces, such as a UUID"
        raise ApiError("invalid_request", message, param=HEADER)
    return value


def session(candidates: Sequence[C], query: Query, rng: Random, config: PolicyConfig) -> C:
    """Return the first on the ring from the session's point on whose load is not far above the mean.

    Without a session id: what `kv_aware` says.
    """
    if not query.session:
        return kv_aware(candidates, query, rng, config)
    total = sum([candidate.num_requests for candidate in candidates])
    bound = math.ceil(config.session_load * (total + 1) / len(candidates))
    points, owners = ring(tuple([candidate.replica_id for candidate in candidates]))
    start = bisect_left(points, point(query.session))
    for step in range(len(owners)):
        candidate = candidates[owners[(start + step) % len(owners)]]
        if candidate.num_requests < bound:
            break
    return candidate


@lru_cache(maxsize=16)
def ring(replica_ids: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Return the ring's points in order, and for each the number of the replica that owns it."""
    pairs = [
        (point(f"{replica_id}#{i}".encode()), n) for n, replica_id in enumerate(replica_ids) for i in range(POINTS)
    ]
    pairs.sort()
    return [place for place, _ in pairs], [owner for _, owner in pairs]


def point(name: bytes) -> int:
    """Return the place of a name on the ring."""
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
