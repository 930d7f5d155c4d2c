"""A line for each request, where that is asked for. Prompts are in it only where that is asked for, too."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

from cluster.telemetry.log_lines import FIELDS
from cluster.token_source import NO_CONTEXT, CallContext, TokenChunk, TokenSource
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
TEXTS = ("structured", "stop", "bad_words")  # parameters that are texts of the client's, or made of them
DEFAULTS = SamplingParams()


class LoggedSource:
    """A token source that logs each request before it passes it on.

    model: its id. max_len: characters of each prompt that are shown; 0 = none.
    """

    def __init__(self, source: TokenSource, tokenizer: Tokenizer, model: str, max_len: int) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._model = model
        self._max_len = max_len

    def generate(self, request: Request, context: CallContext = NO_CONTEXT) -> AsyncIterator[TokenChunk]:
        """Log the request and run it; see `TokenSource.generate`."""
        length, params = len(request.prompt_token_ids), _numbers(request.params)
        fields: dict[str, object] = {"request_id": request.request_id, "tenant": request.tenant, "model": self._model}
        fields |= {"prompt_tokens": length, "params": params}
        if context.trace is not None:
            fields["trace_id"] = context.trace.trace_id
        message = f"request {request.request_id} of tenant {request.tenant}: {length} prompt tokens, {params}"
        if self._max_len:
            fields["prompt"] = self._beginning(request)
            message += f", prompt {fields['prompt']!r}"
        log.info("%s", message, extra={FIELDS: fields})
        return self._source.generate(request, context)

    def finish_choice(self, request_id: str, choice: int) -> None:
        """End one choice."""
        self._source.finish_choice(request_id, choice)

    def _beginning(self, request: Request) -> str:
        # Nearly every token is a character or more, and for the others it is but a beginning that is shown.
        ids = request.prompt_token_ids[: self._max_len]
        return self._tokenizer.decode(ids, skip_special_tokens=False)[: self._max_len]


def _numbers(params: SamplingParams) -> dict[str, object]:
    """Return the parameters that differ from their defaults, without texts; of lists and maps only how long."""
    found: dict[str, object] = {}
    for name in params.__dataclass_fields__:
        value = getattr(params, name)
        if name not in TEXTS and value != getattr(DEFAULTS, name):
            found[name] = len(value) if isinstance(value, tuple) else value
    return found
