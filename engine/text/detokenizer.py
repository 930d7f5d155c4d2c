"""The text of one choice as its tokens arrive, and the stop strings that end it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.text.token_text import TextDecoder


class StopMatcher:
    """Finds the first place where any of the stop strings is complete, reading a character at a time.

    Shared by all choices of a request: it holds no state but the automaton. When two strings end at the same
    character the longer one wins, so the result does not depend on how the text was cut into tokens.
    Source: A. Aho and M. Corasick, "Efficient string matching", 1975.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._match = [0]  # length of the longest stop string that ends at this node
        for stop in stops:
            self._add(stop)
        self._link()

    def scan(self, state: int, text: str) -> tuple[int, int, int]:
        """Read `text` from `state` (0 at the start): the new state, then where a stop ended and its length.

        The position counts characters of `text`, one past the stop; the length is 0 when there was none.
        """
        following, fail, match = self._next, self._fail, self._match
        for position, letter in enumerate(text, 1):
            while state and letter not in following[state]:
                state = fail[state]
            state = following[state].get(letter, 0)
            if match[state]:
                return state, position, match[state]
        return state, len(text), 0

    def held(self, state: int) -> int:
        """How many of the last characters read may be the beginning of a stop string."""
        return self._depth[state]

    def _add(self, stop: str) -> None:
        node = 0
        for letter in stop:
            if letter not in self._next[node]:
                self._next[node][letter] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[node] + 1)
                self._match.append(0)
            node = self._next[node][letter]
        self._match[node] = len(stop)

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for letter, child in self._next[node].items():
                fail = self._fail[node]
                while fail and letter not in self._next[fail]:
                    fail = self._fail[fail]
                self._fail[child] = self._next[fail].get(letter, 0)
                self._match[child] = self._match[child] or self._match[self._fail[child]]
                queue.append(child)


class TextStream:
    """Text of one choice. Everything it knows follows from the tokens pushed: push a token log to rebuild it.

    stopped: a stop string was completed; the choice needs no more tokens.
    num_tokens: tokens used, up to and including the one that completed the stop string.
    num_chars: characters decoded from them, held back or not, with the stop string.

    `min_tokens`: stop strings count only in text that later tokens bring, as the engine does for stop tokens.
    """

    __slots__ = ("_decoder", "_held", "_include_stop", "_min_tokens", "_state", "_stops", "num_chars", "num_tokens",
                 "stopped")  # fmt: skip

    def __init__(
        self, decoder: TextDecoder, stops: StopMatcher | None = None, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._decoder = decoder
        self._stops = stops
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._state = 0
        self._held = ""
        self.stopped = False
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
        self._state, end, length = self._stops.scan(self._state, text)
        if length:
            self.stopped = True
            read = self._held + text[:end]
            self._held = ""
            return read if self._include_stop else read[: len(read) - length]
        known = self._held + text
        cut = len(known) - self._stops.held(self._state)
        self._held = known[cut:]
        return known[:cut]
