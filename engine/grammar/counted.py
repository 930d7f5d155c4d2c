"""Strings of so many characters, in a form that needs few masks: all such strings of a grammar share them.

xgrammar works out a mask, over all tokens, for each place where a character may come, and none where only rules do.
So what is long is counted in blocks, by rules of rules: only the places in one block have masks, and those in a tail,
which is what comes before the quote.

A token that goes on behind the end of a rule is tried each time, unless it is known what follows. Near the end of a
block that would be nearly every token: so a block says what follows, `FAR` more characters, and tokens of characters
alone are known to fit. A quote that comes sooner is taken by a tail: one may begin wherever a block does, and reaches
as far behind it.
"""

from __future__ import annotations

from engine.grammar.charset import Ranges
from engine.grammar.ebnf import Rules, char_class, literal

FAR = 20  # characters; tokens that have more behind the end of a block, which are few, are tried each time
BLOCK = 6  # characters: more are more masks, fewer are more tails at the same time
SPAN = 16  # blocks that are one of the next size, so that few rules end with a string, however long it is
_REACH = FAR + BLOCK - 1  # characters that a tail beside a block must be able to take
_QUOTE = literal('"')


def counted_string(rules: Rules, characters: Ranges, least: int, most: int | None) -> str:
    """Return the rule of a JSON string of `least` to `most` (None: any number of) `characters`, none escaped."""
    return rules.add(f"{_QUOTE} {_Counted(rules, char_class(characters)).rest(least, most)}")


class _Counted:
    """Rules for the rest of a string, with its quote."""

    def __init__(self, rules: Rules, char: str) -> None:
        self._rules = rules
        self._char = char

    def rest(self, least: int, most: int | None) -> str:
        """Return the rule of `least` to `most` characters and the quote."""
        if least > _REACH:
            blocks = (least - FAR) // BLOCK  # FAR characters must follow them
            left = None if most is None else most - blocks * BLOCK
            return self._behind(blocks, self.rest(least - blocks * BLOCK, left))
        if most is None or most <= least + _REACH:
            return self._tail(least, most)
        blocks = -(-least // BLOCK)
        longer = self._behind(blocks, self._at_most(most - blocks * BLOCK))
        return self._rules.add(f"{self._tail(least, least + _REACH)} | {longer}") if least else longer

    def _tail(self, least: int, most: int | None) -> str:
        """Return the same in single characters, from the quote on: tails of other lengths are parts of one chain."""
        ending = self._rules.add(_QUOTE if most is not None else f"{self._char}* {_QUOTE}")
        for _ in range(most - least if most is not None else 0):
            ending = self._rules.add(f"{_QUOTE} | {self._char} {ending}")
        for _ in range(least):
            ending = self._rules.add(f"{self._char} {ending}")
        return ending

    def _at_most(self, most: int, size: int = 0) -> str:
        """Return the rule of up to `most` characters and the quote. size: of the first blocks, 0 = as fits."""
        if not size:
            size = BLOCK
            while most >= 2 * SPAN * size + FAR:
                size *= SPAN
        blocks = max(0, (most - (size + FAR - 1)) // size)  # the rest reaches as far behind a block as `_REACH` does
        left = most - blocks * size
        ending = more = self._tail(0, left) if size == BLOCK else self._at_most(left, size // SPAN)
        for _ in range(blocks):
            more = self._rules.add(f"{ending} | {self._block(size)} {more}")
        return more

    def _behind(self, blocks: int, ending: str) -> str:
        """Return the rule of `blocks` blocks before `ending`."""
        size = 1
        while size * SPAN <= blocks:
            size *= SPAN
        while blocks:
            if size > blocks:
                size //= SPAN
            else:
                ending = self._rules.add(f"{self._block(size * BLOCK)} {ending}")
                blocks -= size
        return ending

    def _block(self, size: int) -> str:
        """Return the rule of `size` characters, behind which there may come `FAR` more."""
        if size > BLOCK:
            part = whole = self._block(size // SPAN)
            for _ in range(SPAN - 1):
                whole = self._rules.add(f"{part} {whole}")
            return whole
        # xgrammar believes what is said to follow a rule that stands in one place, with something behind it; and it
        # writes out a rule that has no others in it.
        nothing = self._rules.add('""')
        one, follows = " ".join([self._char] * BLOCK), " ".join([self._char] * FAR)
        return self._rules.add(f"{self._rules.add(f'{one} {nothing} (= {follows})')} {nothing}")
