"""The policy of Ray's PrefixCacheAffinityRouter (Ray Serve LLM) as a chooser of ours: a named peer for the benchmark.

Ray's own prefix tree does the matching; what its router does around it, inside Ray Serve, is written out here:
choose among two random replicas; unless queue lengths differ by more than `imbalanced_threshold` (infinite by
default), choose among those with the longest matching text instead, or, where less than `match_rate_threshold` of
the text matches, among those with the smallest trees; of these take the one with the shortest queue; then enter the
text into the tree of the replica that was chosen. Its defaults are kept: nothing is ever taken out of the trees.
Source: ray.llm._internal.serve.routing_policies.prefix_aware, Ray 2.60.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from random import Random

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

from cluster.router.replica_handle import LiveRequest, ReplicaHandle
from cluster.routing_policies import random_two

logging.getLogger("cluster").setLevel(logging.WARNING)  # what was just imported shows all there is
FIRST_CHARACTER = 0x10000  # a token is one character here, so that matching text is matching tokens


class RayAffinity:
    """Takes the place of a `Chooser`."""

    def __init__(
        self, rng: Random, imbalanced_threshold: float = float("inf"), match_rate_threshold: float = 0.1
    ) -> None:
        self._rng = rng
        self._imbalanced_threshold = imbalanced_threshold
        self._match_rate_threshold = match_rate_threshold
        self._tree = PrefixTree()
        self._time = 0.0

    def choose(self, live: LiveRequest, pool: Sequence[ReplicaHandle]) -> ReplicaHandle:
        """Return the replica of `pool` that `live` should run on."""
        live.predicted = None
        self._time += 1.0
        by_id = {member.replica_id: member for member in pool}
        self._tree.add_tenants(list(by_id), self._time)
        text = "".join([chr(FIRST_CHARACTER + token) for token in live.log.request.prompt_token_ids])
        names = self._matching(text, by_id) or [member.replica_id for member in random_two(pool, self._rng)]
        chosen = min((by_id[name] for name in names), key=lambda member: member.num_requests)
        self._tree.insert(text, chosen.replica_id, self._time)
        return chosen

    def _matching(self, text: str, by_id: dict[str, ReplicaHandle]) -> list[str]:
        queues = [member.num_requests for member in by_id.values()]
        if max(queues) - min(queues) > self._imbalanced_threshold:
            return []
        matched, names = self._tree.prefix_match(text, list(by_id))
        if len(matched) / len(text) < self._match_rate_threshold:
            names = self._tree.get_smallest_tenants()
        return names or []
