"""Texts that a grammar allows, drawn at random byte by byte, and schemas drawn at random."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import numpy as np

from engine.grammar.base import CompiledGrammar
from engine.grammar.xgrammar_backend import Vocabulary, XgrGrammar
from engine.request import GrammarState

END = 256
WORDS = [bytes([byte]) for byte in range(256)] + [b"", b'"}', b'", "', b'": ', b"true"]
CLOSING = [ord(char) for char in '"}],: ']


@cache
def byte_vocabulary() -> Vocabulary:
    return Vocabulary(WORDS, [END])


def compiled(text: str) -> XgrGrammar:
    return byte_vocabulary().compile(text)


def allowed(state: GrammarState, size: int = len(WORDS)) -> list[int]:
    bits = np.zeros(-(-size // 32), np.int32)
    state.fill(bits)
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:size]).tolist()


def walk(grammar: CompiledGrammar, rng: Random, most: int = 400) -> bytes | None:
    """Return a text that the grammar lets end, None if it went on for `most` tokens."""
    state, text = grammar.state(), b""
    for step in range(most):
        options = allowed(state)
        assert options, f"stuck after {text!r}"
        closing = [token for token in options if token in CLOSING or token == END]
        plain = [token for token in options if token < 128 or token > 255]
        hurry = 0.3 if step < 80 else 0.9
        pool = closing if closing and rng.random() < hurry else plain if plain and rng.random() < 0.95 else options
        token = rng.choice(pool)
        assert state.accept(token)
        if state.finished:
            return text
        text += WORDS[token]
    return None


def texts(grammar: CompiledGrammar, count: int, seed: int = 0) -> list[bytes]:
    rng = Random(seed)
    return [text for _ in range(count) if (text := walk(grammar, rng)) is not None]


def random_schema(rng: Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema whose outputs are short, of all that is enforced."""
    kinds = [_string, _number, _constant, _plain]
    if depth < 3:
        kinds += [_object, _object, _array, _any_of]
    return _object(rng, depth) if depth == 0 else rng.choice(kinds)(rng, depth)


def _object(rng: Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "b c", "naïve", 'q"', "id", "x_1"], rng.randint(1, 3))
    schema = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "title": "T",
    }
    if rng.random() < 0.7:
        schema["additionalProperties"] = False
    return schema


def _array(rng: Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": random_schema(rng, depth + 1)}
    schema["minItems"] = rng.randint(0, 2)
    schema["maxItems"] = schema["minItems"] + rng.randint(0, 2)
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, depth + 1)]
    return schema


def _any_of(rng: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def _string(rng: Random, _: int) -> dict[str, Any]:
    least = rng.randint(0, 3)
    return rng.choice(
        [
            {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)},
            {"type": "string", "pattern": rng.choice(["^[a-z]{1,5}$", "^(ab|cd?)+e{0,2}$", '^[\\d"]{2}\\\\$'])},
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "date-time"])},
        ]
    )


def _number(rng: Random, _: int) -> dict[str, Any]:
    low = rng.randint(-200, 200)
    high = low + rng.randint(3, 5000)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": high},
            {"type": "integer", "exclusiveMinimum": low, "maximum": high},
            {"type": "number", "minimum": low / 8, "exclusiveMaximum": high / 8},
            {"type": "integer", "minimum": low, "maximum": low + 5000, "multipleOf": rng.randint(2, 12)},
            {"type": ["integer", "null"], "maximum": high},
        ]
    )


def _constant(rng: Random, _: int) -> dict[str, Any]:
    return rng.choice(
        [{"enum": ["x", 'y"\n', 3, None, 1.5, [1, {"k": True}]]}, {"const": rng.choice([7, "é", None])}]
    )


def _plain(rng: Random, _: int) -> dict[str, Any]:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}, {"type": "integer"}])
