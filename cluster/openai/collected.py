"""All deltas of one choice, for answers that are not streamed."""

from __future__ import annotations

from cluster.openai.deltas import Delta, PlacedLogprob
from cluster.openai.tools.deltas import CallDelta


class Collected:
    """Gathers the deltas of one choice."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PlacedLogprob] = []
        self._calls: list[CallDelta] = []
        self._reason: str | None = None

    def add(self, delta: Delta) -> None:
        """Take the next delta."""
        self._texts.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._calls.extend(delta.calls)
        self._reason = delta.finish_reason

    def whole(self, index: int) -> tuple[str, Delta]:
        """Return the text and one delta with everything else."""
        reasoning = "".join(self._reasoning)
        whole = Delta(index, "", self._token_ids, self._logprobs, self._reason, self._calls, reasoning)
        return "".join(self._texts), whole
