"""Puts the question to the routing policy: what the index says of a prompt, and which replicas there are."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from cluster.router.dispatch_config import DispatcherConfig
from cluster.router.member import LiveRequest, Member
from cluster.router.routing.candidate import Overlap, Query
from cluster.router.routing.policies import policy_named
from cluster.router.routing.prefix_index import PrefixIndex
from cluster.router.routing.prompt_keys import PromptKeys

NOTHING = Overlap()


class Chooser:
    """The policy of one router, with what it needs to remember between two choices."""

    def __init__(self, config: DispatcherConfig, index: PrefixIndex, rng: Random) -> None:
        self._policy = policy_named(config.routing_policy)
        self._config = config
        self._index = index
        self._rng = rng
        self._turn = 0

    def choose(self, live: LiveRequest, pool: Sequence[Member]) -> Member:
        """Return the replica of `pool`, at least one, that `live` should run on. pool: in the order of their ids.

        Notes in `live` what the replica's prefix cache should have of it.
        """
        request = live.log.request
        live.predicted = None
        if len(pool) == 1:
            return pool[0]
        looks = self._policy.reads_prefixes
        size = pool[0].block_size
        found = self._index.look_up(self._keys(live, size)) if looks else NOTHING
        session = live.context.session_id.encode() + request.cache_salt if live.context.session_id else b""
        overlaps = {replica_id: depth * size for replica_id, depth in found.depths.items()}
        query = Query(len(request.prompt_token_ids), overlaps, found.cold_key, found.heir, session, self._turn)
        self._turn += 1
        chosen: Member = self._policy.pick(pool, query, self._rng, self._config.policy)
        if looks:
            reusable = request.reusable_tokens(live.log.longest, live.log.num_scored)
            if found.cold_key is not None:
                self._index.expect(found.cold_key, chosen.replica_id)
            live.predicted = min(overlaps.get(chosen.replica_id, 0), reusable // size * size)
        return chosen

    def _keys(self, live: LiveRequest, block_size: int) -> PromptKeys:
        if live.keys is None:
            request = live.log.request
            prompt = request.prompt_token_ids[: self._config.max_hashed_tokens]
            live.keys = PromptKeys(prompt, block_size, request.cache_salt)
        return live.keys
