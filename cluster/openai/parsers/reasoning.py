"""Tells thinking, content and calls apart in the text of one choice, whole or in deltas.

Sources: chat templates of DeepSeek R1, Qwen 3, GLM-4.5; OpenAI's page on the harmony format; the pages of vLLM and
SGLang on reasoning outputs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar

from cluster.openai.parsers.reader import CallDelta, Parsed
from cluster.openai.parsers.tool_parser import ToolParser

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

_NO_SPACE = re.compile(r"\S")


@dataclass(frozen=True, slots=True)
class Thought:
    """What is new in one choice: of the thinking, and of the answer."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Finds the thinking at the beginning of one choice's text. However the text is cut, the result is the same.

    The tags and the whitespace around them belong to neither part. Tags that come later are content; thinking that
    does not end is thinking to the end.

    thinking: whether the text starts within the thinking, its opening tag written by the template, as `starts_within`
    finds out; None = as is usual for the model. opening / closing: the tags; special tokens in some models, which
    then must not be skipped when text is made of tokens (`keeps_special_tokens`).
    """

    opening: ClassVar[str] = "<think>"
    closing: ClassVar[str] = "</think>"
    usually_within: ClassVar[bool] = False

    def __init__(self, thinking: bool | None = None) -> None:
        self._start = thinking is not False
        self._within = self.usually_within if thinking is None else thinking
        self._held = ""  # what may be the beginning of a tag
        self._space: list[str] = []  # before it; only shown where more of the same part follows
        self._trim = False  # whether whitespace at the front of what comes next is dropped

    @property
    def within(self) -> bool:
        """Whether the text read so far ends within the thinking."""
        return self._within

    def feed(self, text: str) -> Thought:
        """Return what `text` brings; the last characters may be held back until more is known."""
        self._held += text
        if self._start and not self._read_opening():
            return Thought()
        reasoning = self._read_thinking() if self._within else ""
        return Thought(reasoning, "" if self._within else self._read_answer())

    def finish(self) -> Thought:
        """Return what is left at the end of the text."""
        rest = self._take_held()
        return Thought(rest.rstrip()) if self._within else Thought(content=rest)

    @classmethod
    def starts_within(cls, prompt: str) -> bool | None:
        """Whether the answer to this prompt starts within the thinking; None where the prompt does not show it.

        Templates write the opening tag themselves for models that always think, and an empty thinking for those that
        are told not to.
        """
        end = prompt.rstrip()
        return True if end.endswith(cls.opening) else False if end.endswith(cls.closing) else None

    @classmethod
    def keeps_special_tokens(cls, tokenizer: Tokenizer) -> bool:
        """Whether the text must be made with special tokens, since the tags are some of them."""
        return any(
            tag not in tokenizer.decode(tokenizer.encode(f"a{tag}a", add_special_tokens=False))
            for tag in (cls.opening, cls.closing)
        )

    @classmethod
    def forced_end(cls) -> str:
        """Return what ends the thinking where the model does not, up to the beginning of the answer."""
        return f"\n{cls.closing}\n\n"

    def _read_opening(self) -> bool:
        """Read the tag that a text may begin with; False = not yet known whether it does."""
        text = self._held.lstrip()
        self._space.append(self._held[: len(self._held) - len(text)])
        self._held = text
        if self.opening.startswith(text) and text != self.opening:
            return False
        self._start = False
        if text.startswith(self.opening):
            self._held, self._space = text[len(self.opening) :], []
            self._within = True
        self._held = self._take_held()
        self._trim = self._within
        return True

    def _read_thinking(self) -> str:
        """Return the thinking up to its end; keep back whitespace and what may be the beginning of the tag."""
        self._drop_space()
        text, tag, rest = self._held.partition(self.closing)
        if tag:
            shown = self._without_end(text)
            self._within, self._trim, self._held, self._space = False, True, rest, []
            return shown
        cut = _tag_start(text, self.closing)
        self._held = text[cut:]
        return self._without_end(text[:cut])

    def _without_end(self, text: str) -> str:
        """Return `text` behind the space that was kept back, and keep back the space at its end."""
        shown = text.rstrip()
        before = "".join(self._space) if shown else ""
        if shown:
            self._space = []
        self._space.append(text[len(shown) :])
        return before + shown

    def _take_held(self) -> str:
        """Return all that is held."""
        held = "".join([*self._space, self._held])
        self._held, self._space = "", []
        return held

    def _read_answer(self) -> str:
        self._drop_space()
        text, self._held = self._held, ""
        return text

    def _drop_space(self) -> None:
        if self._trim:
            self._held = self._held.lstrip()
            self._trim = not self._held


class DeepSeekR1Parser(ReasoningParser):
    """DeepSeek R1 and its distillates think always; the first of them leave the opening tag out."""

    usually_within = True


class MiniMaxM2ReasoningParser(ReasoningParser):
    """MiniMax M2 thinks always; its chat template writes the opening tag."""

    usually_within = True


class Qwen3Parser(ReasoningParser):
    """Qwen 3 writes both tags, or none where it is asked not to think."""


class Glm45ReasoningParser(ReasoningParser):
    """GLM-4.5 to 4.7 write both tags, or none where they are asked not to think."""


class _Harmony(Enum):
    """What is read: the head of a message, its body, or a text without any."""

    HEAD = auto()
    BODY = auto()
    PLAIN = auto()


class GptOssParser(ReasoningParser):
    """gpt-oss writes messages with a channel each, in OpenAI's harmony format: `analysis` is its thinking.

    `final`, and `commentary` to nobody, is the answer. A message to somebody, by the role or by the channel, stays in
    the answer as `<|channel|>commentary to=NAME<|message|>...<|call|>`, for `GptOssToolParser`. Several messages of a
    kind are joined by line breaks. A text that begins with no head is the answer.
    """

    opening = "<|channel|>analysis<|message|>"
    closing = "<|end|>"
    head: ClassVar[re.Pattern[str]] = re.compile(
        r"(?:<\|start\|>assistant)?(?:\s*to=(?P<role>[^\s<]+))?\s*<\|channel\|>\s*(?P<channel>\w+)"
        r"(?:\s*to=(?P<to>[^\s<]+))?(?:\s*<\|constrain\|>\s*\w*|\s+\w+)?\s*<\|message\|>"
    )
    longest_head: ClassVar[int] = 400
    begins: ClassVar[tuple[str, ...]] = ("<|start|>assistant", "<|channel|>")
    start: ClassVar[str] = "<|start|>"  # ends a message whose end was left out, too
    ends: ClassVar[tuple[str, ...]] = ("<|end|>", "<|return|>", "<|call|>", start)
    any_end: ClassVar[re.Pattern[str]] = re.compile("|".join(map(re.escape, ends)))
    answer_head: ClassVar[str] = "<|start|>assistant<|channel|>final<|message|>"
    half_head: ClassVar[re.Pattern[str]] = re.compile(r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w*)?")

    def __init__(self, thinking: bool | None = None) -> None:
        super().__init__(thinking)
        self._state = _Harmony.BODY if self._within else _Harmony.HEAD
        self._at = 0  # how much of what is held was read
        self._call = False  # whether the message is to somebody
        self._break = ""  # what joins the message to the one before it of its kind
        self._shown: set[bool] = set()  # whether anything was shown of the answer (False), of the thinking (True)

    def feed(self, text: str) -> Thought:
        """See `ReasoningParser.feed`."""
        self._held, self._at = self._held + text, 0
        shown: dict[bool, list[str]] = {True: [], False: []}  # by whether it is thinking
        more = True
        while more:
            within = self._within
            if self._state is _Harmony.HEAD:
                piece, more = self._read_head()
            elif self._state is _Harmony.BODY:
                piece, more = self._read_body()
            else:
                self._held, self._at = self._held[self._at :], 0
                piece, more = self._take_held(), False
            shown[within].append(piece)
        self._held = self._held[self._at :]
        return Thought("".join(shown[True]), "".join(shown[False]))

    @classmethod
    def forced_end(cls) -> str:
        """See `ReasoningParser.forced_end`."""
        return cls.closing + cls.answer_head

    def finish(self) -> Thought:
        """See `ReasoningParser.finish`; half a head between messages is nobody's."""
        rest = self._take_held()
        if self._state is _Harmony.HEAD and (self._shown or self.half_head.fullmatch(rest)):
            rest = ""
        rest = self._joined(rest)
        return Thought(rest.rstrip()) if self._within else Thought(content=rest)

    def _read_head(self) -> tuple[str, bool]:
        """Read the head of a message; returns what of it is shown, and whether there may be more to read."""
        self._space.append(self._skip_space())
        text = self._held[self._at : self._at + self.longest_head]
        found = self.head.match(text)
        if found is None:
            may_be = any(text.startswith(begin) or begin.startswith(text) for begin in self.begins)
            if may_be and len(text) < self.longest_head and "<|message|>" not in text:
                return "", False
            self._state = _Harmony.PLAIN
            return "", True
        self._at += found.end()
        self._state, self._space = _Harmony.BODY, []
        receiver = found["role"] or found["to"]
        self._call = receiver is not None
        self._within = not self._call and found["channel"] == "analysis"
        self._trim = not self._call
        self._break = "\n" if self._within in self._shown and not self._call else ""
        return (f"<|channel|>commentary to={receiver}<|message|>" if self._call else ""), True

    def _read_body(self) -> tuple[str, bool]:
        """Read a message up to its end; keeps back the space before it, and what may be the beginning of it."""
        if self._trim:
            self._skip_space()
            self._trim = self._at == len(self._held)
        found = self.any_end.search(self._held, self._at)
        end = found.start() if found else min(_tag_start(self._held, end, self._at) for end in self.ends)
        text = self._held[self._at : end]
        text = self._without_end(text) if self._within else text
        self._at = end
        if found is None:
            return self._joined(text), False
        self._at = end if found[0] == self.start else found.end()
        text = self._joined(text + "<|call|>" * self._call)
        self._state, self._within, self._space = _Harmony.HEAD, False, []
        return text, True

    def _skip_space(self) -> str:
        """Read the space that comes next and return it."""
        start, found = self._at, _NO_SPACE.search(self._held, self._at)
        self._at = found.start() if found else len(self._held)
        return self._held[start : self._at]

    def _joined(self, text: str) -> str:
        if not text:
            return ""
        joined, self._break = self._break + text, ""
        self._shown.add(self._within)
        return joined


def _tag_start(text: str, tag: str, after: int = 0) -> int:
    """Where the longest end of `text[after:]` starts that is the beginning of `tag`."""
    for start in range(max(after, len(text) - len(tag) + 1), len(text)):
        if tag.startswith(text[start:]):
            return start
    return len(text)


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
