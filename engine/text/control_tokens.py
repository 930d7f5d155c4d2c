"""Tells the control tokens that a chat template writes from text of a conversation that only looks like them.

A tokenizer finds its control tokens (`<|im_end|>`) in any text, so whoever writes a message could end it and begin
another in somebody else's name. Here such text is broken by a mark before the template is filled in; what is whole
afterwards was written by the template. The mark's own tokens are left out of what the tokenizer makes of it, so the
model reads what was written, as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from engine.errors import InvalidRequestError

_MARKUP = re.compile(r"<\S+>|\[\S+\]")
_SAID = ("content", "reasoning_content")
_START = 3  # characters of a token that are looked for first: few tokens differ in them
_MARKS = range(0xF0000, 0xFFFFE)  # characters for private use
_MARK = re.compile(f"[{chr(_MARKS[0])}-{chr(_MARKS[-1])}]")
_STRETCH = 1 << 16  # characters that are looked through at once: other threads get their turn in between


@dataclass(frozen=True, slots=True)
class Guarded:
    """A conversation whose text holds no whole control token. mark: the character that breaks them."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]
    mark: str


class Finder:
    """Finds tokens in text, in time that grows with the text and not with their number."""

    def __init__(self, tokens: Iterable[str]) -> None:
        known = sorted(set(tokens))
        self._starts = {token[:_START] for token in known}
        self._backend = Backend(WordLevel({"": 0}, unk_token=""))
        self._backend.add_tokens([AddedToken(token, normalized=False) for token in known])

    def present(self, text: str) -> list[str]:
        """Return the tokens that `text` holds, the longest first."""
        if not any(start in text for start in self._starts):
            return []
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)  # leaves the GIL to others
        return sorted([str(self._backend.id_to_token(each)) for each in {*encoding.ids} - {0}], key=len, reverse=True)


class ControlTokens:
    """The control tokens of one tokenizer. All methods may be called from any number of threads at once.

    They are its special tokens, and of the others those that its template writes (`<tool_call>`, `<think>`).
    """

    def __init__(self, backend: Backend, template: str) -> None:
        control = [
            token
            for token in backend.get_added_tokens_decoder().values()
            if len(token.content) > 1
            and (token.special or (token.content in template and _MARKUP.fullmatch(token.content)))
        ]
        special = [token.content for token in control if token.special]
        self._all = Finder([token.content for token in control])
        # A developer may write of calls to the model, and templates look for the thinking in what it said before.
        self._of_role = {
            "system": Finder(special),
            "assistant": Finder([text for text in special if "think" not in text.lower()]),
        }
        self._backend = backend
        # Some are found only after characters were folded (`<|END|>`), so text may hold them that does not look so.
        self._folds = backend.normalizer if any(token.normalized for token in control) else None

    def guard(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Guarded | None:
        """Return the conversation with what looks like control tokens broken, None if there is nothing of the kind.

        Raises `UnicodeEncodeError` for half of a surrogate pair, and `InvalidRequestError` naming `messages` for what
        the tokenizer takes for a control token although it is written in another way, and for text that leaves no
        character to break one with.
        """
        texts = list(_texts([messages, options]))
        "".join(texts).encode()
        if not any(self._all.present(text) for text in texts):
            self._check_folded(texts)
            return None
        mark = _free_mark(texts)
        told = [self._broken_message(message, mark) for message in messages]
        more = self._broken(options, mark, self._all)
        broken = list(_texts([told, more]))
        self._check_folded(broken)
        return None if broken == texts else Guarded(told, more, mark)

    def encode(self, text: str, mark: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a filled-in template whose conversation was guarded with `mark`."""
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        places = zip(encoding.ids, encoding.offsets, strict=True)
        return [token for token, (begin, end) in places if text[begin:end] != mark]

    def _check_folded(self, texts: Sequence[str]) -> None:
        if self._folds is None:
            return
        for text in texts:
            hidden = set(self._all.present(self._folds.normalize_str(text))) - set(self._all.present(text))
            if hidden:
                raise InvalidRequestError(
                    f"messages hold what this model's tokenizer takes for {sorted(hidden)[0]}; leave it out",
                    "messages",
                )

    def _broken_message(self, message: Mapping[str, Any], mark: str) -> dict[str, Any]:
        said = self._of_role.get(message["role"], self._all)
        return {
            name: self._broken(value, mark, said if name in _SAID else self._all) if name != "role" else value
            for name, value in message.items()
        }

    def _broken(self, value: Any, mark: str, finder: Finder) -> Any:
        if isinstance(value, str):
            while tokens := finder.present(value):  # more than once only where tokens overlap
                for token in tokens:
                    value = value.replace(token, token[0] + mark + token[1:])
            return value
        if isinstance(value, Mapping):
            return {self._broken(k, mark, finder): self._broken(v, mark, finder) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._broken(each, mark, finder) for each in value]
        return value


def _free_mark(texts: Iterable[str]) -> str:
    """Return the first mark that no text holds; looks through each once, whatever it holds."""
    taken: set[str] = set()
    for text in texts:
        for start in range(0, len(text), _STRETCH):
            taken.update(_MARK.findall(text, start, start + _STRETCH))
    for code in _MARKS:
        if chr(code) not in taken:
            return chr(code)
    raise InvalidRequestError(
        f"messages hold all {len(_MARKS)} private characters of plane 15 beside a control token; leave one out",
        "messages",
    )


def _texts(value: Any) -> Iterator[str]:
    """Yield every text within."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield name
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
