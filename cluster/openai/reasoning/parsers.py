"""Tells thinking from answer in the text of one choice, whole or in deltas.

Sources: chat templates of DeepSeek R1, Qwen 3; the pages of vLLM and SGLang on reasoning outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cluster.openai.tools.registry import Registry

if TYPE_CHECKING:  # a command line that checks settings must not wait for transformers
    from engine.text.tokenizer import Tokenizer


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
        self._held = ""
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
        rest, self._held = self._held, ""
        return Thought(rest.rstrip()) if self._within else Thought(content=rest)

    @classmethod
    def starts_within(cls, prompt: str) -> bool | None:
        """Whether the answer to this prompt starts within the thinking; None where the prompt does not tell.

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

    def _read_opening(self) -> bool:
        """Read the tag that a text may begin with; False = not yet known whether it does."""
        text = self._held.lstrip()
        if self.opening.startswith(text) and text != self.opening:
            return False
        self._start = False
        if text.startswith(self.opening):
            self._held = text[len(self.opening) :]
            self._within = True
        self._trim = self._within
        return True

    def _read_thinking(self) -> str:
        """Return the thinking up to its end; keep back whitespace and what may be the beginning of the tag."""
        self._drop_space()
        text, tag, rest = self._held.partition(self.closing)
        if tag:
            self._within, self._trim, self._held = False, True, rest
            return text.rstrip()
        kept = len(text) - _tag_start(text, self.closing)
        shown = text[: len(text) - kept].rstrip()
        self._held = text[len(shown) :]
        return shown

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


class Qwen3Parser(ReasoningParser):
    """Qwen 3 writes both tags, or none where it is told not to think."""


def _tag_start(text: str, tag: str) -> int:
    """Where the longest end of `text` starts that is the beginning of `tag`."""
    for start in range(max(0, len(text) - len(tag) + 1), len(text)):
        if tag.startswith(text[start:]):
            return start
    return len(text)


REASONING_PARSERS: Registry[type[ReasoningParser]] = Registry(
    "reasoning_parser",
    "squadron.reasoning_parsers",
    {"deepseek_r1": DeepSeekR1Parser, "qwen3": Qwen3Parser},
)
