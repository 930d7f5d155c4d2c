"""Runs one prepared row to its one result: the answer as HTTP would give it, or one typed error."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from msgspec import json

from cluster.batch.errors import BatchError
from cluster.batch.ledger.records import OK, RowDone
from cluster.batch.prepare import Prepared
from cluster.batch.row_tokens import RowSource, RowTokens
from cluster.batch.rows import CHAT, COMPLETIONS
from cluster.errors import ApiError, as_api_error
from cluster.openai.call import Call
from cluster.openai.embeddings import EmbeddingCall, embedded, whole_answer
from cluster.openai.frames import ChatFrames, CompletionFrames
from cluster.openai.generation import Generation
from cluster.openai.served_model import ServedModel
from cluster.openai.whole import whole_body
from cluster.telemetry.metrics import ModelMetrics, RequestTrack
from cluster.token_source import TokenSource
from engine.errors import InvalidRequestError

logger = logging.getLogger(__name__)

MODEL_CHANGED = "model_changed"
RETRIES = 3  # of errors that say that they may be over by then
RETRY_PAUSE = 0.5  # seconds before the first; twice as long before each later one
_FRAMES = {CHAT: ChatFrames, COMPLETIONS: CompletionFrames}


class Answers:
    """Answers rows of one model. Errors become results, too; raised are a broken ledger and the end of the model."""

    def __init__(self, model: ServedModel, source: RowSource, metrics: ModelMetrics) -> None:
        self._model = model
        self._source = source
        self._metrics = metrics

    async def answer(self, prepared: Prepared) -> RowDone:
        """Return the row's result."""
        row, attempt = prepared.task.row, 0
        while True:
            try:
                return await self._answer(prepared)
            except (ApiError, InvalidRequestError) as error:
                typed = as_api_error(error)
            if typed.code == MODEL_CHANGED:
                raise BatchError(
                    "while the batch ran, the replicas were replaced by such as run another model, or compute it "
                    "otherwise; run it again with --resume, which goes on or says why it cannot"
                )
            if not typed.retryable or attempt == RETRIES:
                return failed(row, typed)
            logger.info("row %d is tried again: %s", row, typed.message)
            await asyncio.sleep(RETRY_PAUSE * 2**attempt)
            attempt += 1

    async def _answer(self, prepared: Prepared) -> RowDone:
        row, call = prepared.task.row, prepared.call
        tokens = RowTokens(row, prepared.requests, self._source, not prepared.tells_its_prompt)
        track = self._metrics.track(prepared.requests)
        if isinstance(call, EmbeddingCall):
            vectors = await embedded(call, tokens, track)
            body = await whole_answer(call, vectors, self._model.model_id)
            return RowDone(row, OK, body, prepared.num_prompt_tokens)
        try:
            return await self._text(prepared, call, tokens, track)
        except (ApiError, InvalidRequestError) as error:
            raise call.clients_error(error) from error

    async def _text(self, prepared: Prepared, call: Call, tokens: TokenSource, track: RequestTrack) -> RowDone:
        tokenizer = self._model.tokenizer
        generation = Generation(call, prepared.requests, tokenizer, tokens, track)
        frames = _FRAMES[prepared.task.url](call, self._model.model_id, tokenizer, generation.prompts)
        async with aclosing(generation.deltas()) as deltas:
            body = await whole_body(call, generation, deltas, frames)
        usage = generation.usage
        return RowDone(
            prepared.task.row,
            OK,
            body,
            prepared.num_prompt_tokens,
            usage.completion_tokens,
            reasoning_tokens=usage.reasoning_tokens or 0,
            cached_tokens=generation.cached_tokens,
        )


def failed(row: int, error: ApiError) -> RowDone:
    """Return the result of a row that ended in an error."""
    return RowDone(row, error.status, json.encode(error.body()), code=error.code)
