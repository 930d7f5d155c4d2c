"""From token ids to the text of one choice, a few at a time: up to a stop string, and never half a character.

Most tokenizers spell a token as bytes (byte-level BPE, sentencepiece with byte fallback): there a table of the bytes
of each token and one incremental UTF-8 decoder give exact text at well under a microsecond a token. Any other
tokenizer is decoded over a sliding window of its last tokens.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
MAX_STUCK_TOKENS = 8  # a character has at most 4 bytes: text that is still broken after 8 tokens stays broken
LONGEST_WINDOW = 64  # tokens that are decoded again and again, where no character ends with a token
CONTEXT_TOKENS = 6  # of the prompt, before the text to come: enough to know that it does not begin here
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream:
    """Text of one choice. Everything it knows follows from the tokens pushed: push a token log to rebuild it.

    stopped: a stop string was completed; the choice needs no more tokens. stop_string: which one, "" without.
    num_tokens: tokens used, up to and including the one that completed the stop string.
    num_chars: characters decoded from them, held back or not, with the stop string.

    `min_tokens`: stop strings count only in text that later tokens bring, as the engine does for stop tokens.
    """

    __slots__ = (
        "_decoder",
        "_held",
        "_include_stop",
        "_min_tokens",
        "_stops",
        "num_chars",
        "num_tokens",
        "stop_string",
        "stopped",
    )

    def __init__(
        self, decoder: TextDecoder, stops: StopStrings | None = None, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._decoder = decoder
        self._stops = stops
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self.stopped = False
        self.stop_string = ""
        self.num_tokens = 0
        self.num_chars = 0

    def push(self, token_ids: Sequence[int], ends_with_stop_token: bool = False) -> str:
        """Take new tokens and return the text that can be shown now; "" once `stopped`.

        `ends_with_stop_token`: the last id is the stop token that ended the choice: it is used but not shown, unless
        the request wants its stops in the output.
        """
        if self.stopped:
            return ""
        if self._stops is not None:
            return self._push_watching(token_ids, ends_with_stop_token)
        self.num_tokens += len(token_ids)
        text = self._decoder.feed(self._visible(token_ids, ends_with_stop_token))
        self.num_chars += len(text)
        return text

    def flush(self) -> str:
        """Return what was held back, after the last token of a choice that no stop string ended."""
        if self.stopped:
            return ""
        rest = self._watch(self._decoder.finish())
        shown, self._held = rest + self._held, ""
        return shown

    def _visible(self, token_ids: Sequence[int], ends_with_stop_token: bool) -> Sequence[int]:
        return token_ids[:-1] if ends_with_stop_token and not self._include_stop else token_ids

    def _push_watching(self, token_ids: Sequence[int], ends_with_stop_token: bool) -> str:
        shown = []
        for token_id in self._visible(token_ids, ends_with_stop_token):
            self.num_tokens += 1
            text = self._decoder.feed((token_id,))
            if self.num_tokens <= self._min_tokens:
                self.num_chars += len(text)
                shown.append(text)
            elif text:
                shown.append(self._watch(text))
                if self.stopped:
                    return "".join(shown)
        self.num_tokens += ends_with_stop_token and not self._include_stop
        return "".join(shown)

    def _watch(self, text: str) -> str:
        """Return what of held and new text can be shown, and hold the rest; sets `stopped`."""
        self.num_chars += len(text)
        if self._stops is None:
            return text
        known = self._held + text
        end, length = self._stops.find(known, len(self._held))
        if length:
            self.stopped = True
            self.stop_string = known[end - length : end]
            self._held = ""
            return known[: end if self._include_stop else end - length]
        cut = len(known) - self._stops.num_held(known)
        self._held = known[cut:]
        return known[:cut]


class StopStrings:
    """The stop strings of one request, for all its choices.

    Of a text one knows how much was looked through before. Work on new text is bounded by the number of stop strings
    and their length (`SamplingParams`), whatever came before it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._sorted = sorted(stops)
        self._stops = [(stop, len(stop)) for stop in self._sorted]
        self._firsts = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops))

    def find(self, text: str, looked: int) -> tuple[int, int]:
        """Return where the first stop string ends that ends after `looked` characters, and its length; (0, 0) = none.

        Of two that end at the same character the longer one counts: so the cut of a text into tokens has no say.
        """
        end = length = 0
        for stop, size in self._stops:
            start = text.find(stop, looked + 1 - size if looked >= size else 0)
            if start >= 0 and (not length or (start + size, length) < (end, size)):
                end, length = start + size, size
        return end, length

    def num_held(self, text: str) -> int:
        """Return how many characters at the end of `text` may be the beginning of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts and self._begins_one(text[start:]):
                return len(text) - start
        return 0

    def _begins_one(self, text: str) -> bool:
        place = bisect_left(self._sorted, text)  # what begins with `text` is sorted right after it
        return place < len(self._sorted) and self._sorted[place].startswith(text)


class TextDecoder(ABC):
    """Turns the ids of one choice into text as they come. `feed` after `finish` is an error of the caller."""

    @abstractmethod
    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain now; an incomplete character waits for its next token."""

    @abstractmethod
    def finish(self) -> str:
        """Return what still waits, an incomplete character as U+FFFD."""


class ByteTable(dict[int, bytes]):
    """Bytes of each token, worked out when first asked for. Unknown ids and skipped tokens are empty."""

    def __init__(self, backend: Tokenizer, style: str, skipped: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._spell = _spell_byte_level if style == "byte_level" else _spell_sentencepiece
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._backend.id_to_token(token_id)
        spelled = b"" if token is None else self._spell(token)
        self[token_id] = spelled
        return spelled


class ByteDecoder(TextDecoder):
    """Decoder of tokenizers whose tokens are strings of bytes."""

    def __init__(self, table: ByteTable, strip_first_space: bool) -> None:
        self._lookup = table.__getitem__
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._strip = strip_first_space

    def feed(self, token_ids: Sequence[int]) -> str:
        """See `TextDecoder.feed`."""
        text = self._decode(b"".join(map(self._lookup, token_ids)))
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """See `TextDecoder.finish`."""
        return self._decode(b"", True)


class WindowDecoder(TextDecoder):
    """Decoder for every other tokenizer: the difference between two decodings of the last tokens.

    The window begins one settled piece back, so that what a tokenizer does to the start of a text (dropping a space)
    is the same in both decodings and cancels out.
    """

    def __init__(self, backend: Tokenizer, skip_special_tokens: bool, context: Sequence[int] = ()) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        self._window = list(context[-CONTEXT_TOKENS:])  # settled tokens that give context, then the tokens that wait
        self._settled = len(self._window)  # how many tokens of the window are settled
        self._shown = self._decode(self._window)  # text of the window that was returned
        self._stuck = 0  # tokens since the last one that brought text, from a broken character on

    def feed(self, token_ids: Sequence[int]) -> str:
        """See `TextDecoder.feed`."""
        return "".join([self._feed_one(token) for token in token_ids])

    def _feed_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = text if self._stuck >= MAX_STUCK_TOKENS else text.rstrip(REPLACEMENT)
        delta = certain[len(self._shown) :]
        self._stuck = 0 if delta or not text.endswith(REPLACEMENT) else self._stuck + 1
        if delta and len(certain) == len(text):
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
            self._shown = self._decode(self._window)
        elif delta:  # the last token ends in the middle of a character: there is no clean place to cut the window
            self._shown = certain
            if len(self._window) > LONGEST_WINDOW:
                self._shorten(len(text) - len(certain))
        elif len(self._window) - self._settled > LONGEST_WINDOW:  # a skipped token, or one that is unknown
            del self._window[self._settled]
        return delta

    def _shorten(self, waiting: int) -> None:
        """Forget the first half of the window. waiting: characters at its end that are not shown yet."""
        self._window, self._settled = self._window[LONGEST_WINDOW // 2 :], 0
        text = self._decode(self._window)
        self._shown = text[: len(text) - waiting]

    def finish(self) -> str:
        """See `TextDecoder.finish`."""
        return self._decode(self._window)[len(self._shown) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=self._skip)
        return text


class TextDecoders:
    """Makes decoders for one tokenizer; the byte tables are shared by all of them."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._style, self._strip = _spelling(_decoder_description(backend))
        special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._shown_table = ByteTable(backend, self._style, frozenset())
        self._skip_table = ByteTable(backend, self._style, special)
        self._anchor = next(
            (ids[0] for letter in "aA0." if (ids := backend.encode(letter, add_special_tokens=False).ids)), 0
        )

    def decoder(self, skip_special_tokens: bool, context: Sequence[int] = ()) -> TextDecoder:
        """Return a fresh decoder for text that goes on after the tokens of `context`.

        Some tokenizers drop a space at the beginning of a text, and only there: what follows a prompt keeps it.
        """
        if self._style == "other":
            return WindowDecoder(self._backend, skip_special_tokens, context)
        begins = self._strip and not any(map(self._skip_table.__getitem__, context))
        return ByteDecoder(self._skip_table if skip_special_tokens else self._shown_table, begins)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that the token stands for, special tokens by their name; maybe half a character."""
        if self._style == "other":
            return str(self._backend.decode([token_id], skip_special_tokens=False)).encode()
        return self._shown_table[token_id]

    def text_bytes(self, token_id: int) -> bytes:
        """Bytes that the token adds to a text that has begun; nothing for special tokens and unknown ids."""
        if self._style != "other":
            return self._skip_table[token_id]
        before, both = (
            self._backend.decode(ids, skip_special_tokens=True) for ids in ([self._anchor], [self._anchor, token_id])
        )
        return str(both).removeprefix(str(before)).encode()


def _decoder_description(backend: Tokenizer) -> dict[str, Any]:
    if backend.decoder is None:
        return {}
    described: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return described


def _spelling(decoder: dict[str, Any]) -> tuple[str, bool]:
    """Return how tokens spell text ("byte_level", "sentencepiece", "other") and whether a first space is dropped."""
    if decoder.get("type") == "ByteLevel":
        return "byte_level", False
    steps = decoder.get("decoders", [])
    if len(steps) == 1:
        return _spelling(steps[0])
    kinds = [step["type"] for step in steps]
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return "other", False
    strip = kinds[3:] == ["Strip"]
    if steps[0]["pattern"] != {"String": "▁"} or steps[0]["content"] != " ":
        return "other", False
    if strip and (steps[3]["content"], steps[3]["start"], steps[3]["stop"]) != (" ", 1, 0):
        return "other", False
    return "sentencepiece", strip


@cache
def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable bytes stand for themselves, the others are letters from U+0100 on.

    Source: the GPT-2 release (`bytes_to_unicode`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    letters.update({chr(256 + i): byte for i, byte in enumerate(hidden)})
    return letters


def _spell_byte_level(token: str) -> bytes:
    letters = _byte_of_letter()
    try:
        return bytes([letters[letter] for letter in token])
    except KeyError:
        return token.encode()  # an added token that is spelled as plain text


def _spell_sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
