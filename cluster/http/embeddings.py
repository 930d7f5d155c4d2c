"""`POST /v1/embeddings`."""

from __future__ import annotations

from cluster.http.base_endpoint import Endpoint, Incoming
from cluster.http.exchange import Answer
from cluster.openai.embeddings import embedded, embedding_call, whole_answer


class EmbeddingsEndpoint(Endpoint):
    """`POST /v1/embeddings`. All inputs are embedded or the call fails: there is no answer in part."""

    async def _answer(self, incoming: Incoming, answer: Answer) -> None:
        front, visit = incoming.front, incoming.visit
        call = await self._worked(incoming, embedding_call)
        incoming.exchange["id"] = call.request_id
        incoming.tell_ignored(call.ignored)
        await visit.charge_prompt(call.num_tokens)
        track = front.metrics.track(call.requests, visit.charge_output)
        vectors = await embedded(call, visit.source, track)
        await answer.json(200, await whole_answer(call, vectors, front.model_id))
