"""Grammars as text: rules in GBNF, the notation of llama.cpp that xgrammar reads."""

from __future__ import annotations

from engine.errors import InvalidRequestError
from engine.grammar.charset import Ranges

MAX_TEXT = 2 * 1024 * 1024  # characters of one grammar, which may be larger than what it was made of


class Rules:
    """Collects the rules of one grammar. Equal bodies become one rule."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._size = 0

    def add(self, body: str) -> str:
        """Return the name of a rule with this body. Raises `InvalidRequestError` when the grammar grows too large."""
        name = self._names.get(body)
        if name is None:
            name = self._names[body] = self.reserve()
            self.define(name, body)
        return name

    def reserve(self) -> str:
        """Return the name of a rule that is defined later (it may stand in its own body)."""
        name = f"r{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Give a reserved rule its body."""
        self._bodies[name] = body
        self._size += len(name) + len(body)
        if self._size > MAX_TEXT:
            raise InvalidRequestError("what the output must match is too large; make it simpler", "structured")

    def text(self, root: str) -> str:
        """Return the grammar whose output is what `root`, the body of a rule, stands for."""
        return "\n".join([f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._bodies.items())]) + "\n"


def literal(text: str) -> str:
    """Return an expression that matches `text` and nothing else."""
    return '"' + "".join(map(_spelled, text)) + '"'


def char_class(ranges: Ranges) -> str:
    """Return an expression that matches one character of `ranges`."""
    spelled = [_spelled(chr(low)) + ("" if low == high else "-" + _spelled(chr(high))) for low, high in ranges]
    return "[" + "".join(spelled) + "]"


def either(*options: str) -> str:
    """Return an expression that matches what any of `options` does."""
    return options[0] if len(options) == 1 else "(" + " | ".join(options) + ")"


def repeat(body: str, least: int, most: int | None) -> str:
    """Return an expression for `body`, `least` to `most` times (None: any number of times)."""
    if most == 0:
        return '""'
    sign = {(1, 1): " ", (0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    return f"({body})" + (sign or f"{{{least},{'' if most is None else most}}}")


def _spelled(char: str) -> str:
    """Letters and digits as they are, all else by number: nothing is left that could have a meaning of its own.

    Never as \\x, which xgrammar lets go on for as many hexadecimal digits as follow.
    """
    code = ord(char)
    if char.isascii() and (char.isalnum() or char in " ,:{}_"):
        return char
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
