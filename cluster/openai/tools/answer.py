"""The text of one chat choice in its three parts: thinking, content, calls."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.openai.reasoning.parsers import ReasoningParser
from cluster.openai.tools.deltas import CallDelta, Parsed
from cluster.openai.tools.parser import ToolParser


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What is new in one choice, in the order of its parts."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class AnswerParser:
    """Parses one choice. However its text is cut, the joined deltas are the same.

    thinking: None where the server has no reasoning parser, or the output is bound by a grammar from its first token
    on. tools: None where the call has none. Calls are looked for in the answer only, never in the thinking.
    """

    def __init__(self, thinking: ReasoningParser | None = None, tools: ToolParser | None = None) -> None:
        self._thinking = thinking
        self._tools = tools

    @property
    def within_thinking(self) -> bool:
        """Whether the text so far ends within the thinking."""
        return self._thinking is not None and self._thinking.within

    @property
    def done(self) -> bool:
        """Whether the choice needs no more tokens: the one call that is allowed is complete."""
        return self._tools is not None and self._tools.done

    def feed(self, text: str) -> AnswerDelta:
        """Return what `text` brings."""
        if self._thinking is None:
            return self._answer("", text)
        thought = self._thinking.feed(text)
        return self._answer(thought.reasoning, thought.content)

    def finish(self) -> AnswerDelta:
        """Return what is left at the end of the text."""
        rest = self._thinking.finish() if self._thinking is not None else None
        found = self._answer(rest.reasoning, rest.content) if rest is not None else AnswerDelta()
        last = self._tools.finish() if self._tools is not None else Parsed()
        return AnswerDelta(found.reasoning, found.content + last.content, found.calls + last.calls)

    def finish_reason(self, reason: str) -> str:
        """Return the reason that clients see for the engine's: `tool_calls` where the model stopped to call."""
        return "tool_calls" if reason == "stop" and self._tools is not None and self._tools.num_calls else reason

    def _answer(self, reasoning: str, text: str) -> AnswerDelta:
        if self._tools is None:
            return AnswerDelta(reasoning, text)
        found = self._tools.feed(text) if text else Parsed()
        return AnswerDelta(reasoning, found.content, found.calls)
