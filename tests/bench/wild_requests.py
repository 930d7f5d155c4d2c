"""Whole HTTP requests made at random from a seed: what clients send, what they should not, and what is huge.

Each is made of a route's usual body, fields of that route drawn within and around their bounds, and in one of four
a mutation: of a value anywhere in it, of its bytes, or of its headers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.grammar_walk import random_schema

VOCABULARY = 4096  # of the demo model
CONTEXT = 2048
WORDS = [
    "def ",
    "self",
    "(value):\n",
    "    return ",
    "import os\n",
    "é",
    "🚀",
    "\x00",
    "\u202e",
    "<|end|>",
    "{",
    '"',
    "\\",
]
EDGES = [0, -1, 1, 2, 0.5, -0.0, 1e-45, 1e-39, 5e-324, 1e39, 1e308, 100, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 10**400]
STRANGE: list[Any] = [None, True, "", "a", "NaN", [], {}, [[]], [None], {"": {}}, {"type": "text"}, *EDGES]
GRAMMARS = [
    'root ::= "yes" | "no"',
    "root ::= s\ns ::= s s s | s s | [a-z]\n",  # ambiguous: each token is dearer than the one before
    'root ::= "a"* "a"* "a"* "a"* "b"',
    "root ::= root",
    'root ::= "(" root ")" | ""',
    "root ::= [^\\x00-\\U0010ffff]",
    'root ::= a\na ::= b b b b\nb ::= c c c c\nc ::= d d d d\nd ::= "x" | ""',
    "start: WORD\nWORD: /[a-z]+/",
    "root ::=",
]
PATTERNS = [
    "[a-z]{1,5}",
    "(a|aa)+b",
    "(a*)*c",
    "(.*)(.*)(.*)x",
    "a{1000}",
    "a{0,100000}",
    "(((",
    "[д-я]{130,}",
    "(?<=a)b",
    "\\d+",
]


@dataclass(frozen=True, slots=True)
class WildRequest:
    """One request. leaves: seconds after which its client hangs up, None = it reads to the end."""

    route: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    leaves: float | None = None

    def __str__(self) -> str:
        shown = self.body[:2000].decode(errors="replace")
        more = f" and {len(self.body) - 2000:,} bytes more" if len(self.body) > 2000 else ""
        return f"POST {self.route} {self.headers} leaves={self.leaves}: {shown}{more}"


def wild_request(seed: str) -> WildRequest:
    """Return the request of this seed."""
    rng = Random(seed)
    route = rng.choices(list(ROUTES), weights=[6, 4, 3, 1, 1, 1])[0]
    body = {"model": "demo", **ROUTES[route](rng)}
    if rng.random() < 0.2:
        body = mutated(body, rng)
    raw = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    if rng.random() < 0.05:
        raw = rng.choice(BYTES)(raw, rng)
    if rng.random() < 0.04:
        headers = rng.choice([{}, {"content-type": "text/plain"}, headers | {"content-encoding": "gzip"}])
        headers |= rng.choice([{}, {"x-request-id": "é" * rng.choice([1, 5000])}, {"authorization": "Bearer x"}])
        headers = {name: value.encode("utf-8", "replace").decode("latin-1") for name, value in headers.items()}
    return WildRequest(route, raw, headers, rng.choice([0.0, 0.02, 0.2, 1.0]) if rng.random() < 0.15 else None)


def ordinary_request() -> WildRequest:
    """Return a request as most are, that all others are held against."""
    body = {"model": "demo", "prompt": "import os\n" * 8, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    return WildRequest(
        "/v1/completions", json.dumps(body | {"stream": True}).encode(), {"content-type": "application/json"}
    )


def _text(rng: Random) -> str:
    size = rng.choices([0, 3, 30, 300, 1500, 20_000], weights=[0.3, 6, 6, 1, 0.3, 0.1])[0]
    words = [rng.choice(WORDS) for _ in range(min(size, 500))]
    return "".join(words) * max(1, size // 500)


def _ids(rng: Random) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 4, 40, 400, CONTEXT - 70]))]


def _number(rng: Random, low: float, high: float, whole: bool = False) -> Any:
    """Mostly within the bounds, often at them, sometimes anywhere."""
    if rng.random() < 0.03:
        return rng.choice(EDGES)
    if rng.random() < 0.3:
        return rng.choice([low, high])
    return rng.randint(int(low), int(high)) if whole else rng.uniform(low, high)


def _schema(rng: Random) -> Any:
    kind = rng.random()
    if kind < 0.6:
        return random_schema(rng)
    count = rng.choice([3, 30, 300, 900])
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(rng.choice([3, 30, 300])):
        deep = {"type": "array", "items": deep}
    return rng.choice(
        [
            {"type": "object", "properties": {f"p{i}": random_schema(rng, 3) for i in range(count)}},
            {"type": "string", "maxLength": rng.choice([129, 200, 5000, 10**9])},
            {"type": "array", "items": {"type": "string"}, "minItems": rng.choice([3, 130, 10**6])},
            {"anyOf": [{"const": f"{i}" * 9} for i in range(count)]},
            {"$ref": "#"},
            {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "object", "unheard": deep},
            deep,
            True,
        ]
    )


def _structured(rng: Random) -> dict[str, Any]:
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"grammar": rng.choice(GRAMMARS)},
        lambda: {"regex": rng.choice(PATTERNS)},
        lambda: {"choice": [_text(rng)[:40] for _ in range(rng.choice([1, 3, 1000]))]},
        lambda: {"json": _schema(rng)},
        lambda: {"json_object": True},
    ]
    return rng.choice(kinds)()


def _generation(rng: Random) -> dict[str, Any]:
    """Some of the fields that chats and completions share."""
    fields: dict[str, Callable[[], Any]] = {
        "n": lambda: _number(rng, 1, 16, whole=True),
        "temperature": lambda: _number(rng, 0, 100),
        "top_p": lambda: _number(rng, 1e-9, 1),
        "top_k": lambda: _number(rng, -1, VOCABULARY + 1, whole=True),
        "min_p": lambda: _number(rng, 0, 1),
        "repetition_penalty": lambda: _number(rng, 0.01, 100),
        "presence_penalty": lambda: _number(rng, -2, 2),
        "frequency_penalty": lambda: _number(rng, -2, 2),
        "seed": lambda: _number(rng, -(2**63), 2**63 - 1, whole=True),
        "stop": lambda: [_text(rng)[:60] for _ in range(rng.randint(0, 17))],
        "stop_token_ids": lambda: _ids(rng)[: rng.choice([1, 1024])],
        "logit_bias": lambda: {str(one): rng.choice([-100, -1, 0.5, 100]) for one in _ids(rng)[:1024]},
        "allowed_token_ids": lambda: _ids(rng),
        "bad_words": lambda: [_text(rng)[:60] or "x" for _ in range(rng.choice([1, 128]))],
        "min_tokens": lambda: _number(rng, 0, 200, whole=True),
        "prompt_logprobs": lambda: _number(rng, 0, 20, whole=True),
        "structured_outputs": lambda: _structured(rng),
        "truncate_prompt_tokens": lambda: _number(rng, -1, 60, whole=True),
        "priority": lambda: rng.choice([0, 0, 0, 1]),
        "cache_salt": lambda: _text(rng)[:300],
        "request_id": lambda: rng.choice(["r" * 128, _text(rng)[:300]]),
        "ignore_eos": lambda: rng.random() < 0.5,
        "add_special_tokens": lambda: rng.random() < 0.5,
        "skip_special_tokens": lambda: rng.random() < 0.5,
        "return_token_ids": lambda: True,
    }
    chosen = rng.sample(sorted(fields), rng.choice([0, 0, 1, 2, 4, 9]))
    body = {"max_tokens": _number(rng, 1, rng.choice([20, 200, CONTEXT]), whole=True)}
    body |= {name: fields[name]() for name in chosen}
    if rng.random() < 0.5:
        body |= {"stream": True, **rng.choice([{}, {"stream_options": {"include_usage": True}}])}
    return body


def _tools(rng: Random) -> dict[str, Any]:
    names = [f"tool_{i}" for i in range(rng.choice([1, 2, 20, 128]))]
    schema = _schema(rng) if rng.random() < 0.5 else {"type": "object", "properties": {"a": random_schema(rng)}}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in names]
    choice = rng.choice(["auto", "none", "required", {"type": "function", "function": {"name": names[0]}}])
    return {"tools": tools, "tool_choice": choice}


def _message(rng: Random, role: str) -> dict[str, Any]:
    return {"role": role, "content": _text(rng)} | ({"tool_call_id": "call_1"} if role == "tool" else {})


def _chat(rng: Random) -> dict[str, Any]:
    roles = ["system", "user", "assistant", "tool", "developer"]
    messages = [_message(rng, rng.choice(roles)) for _ in range(rng.choice([0, 0, 1, 1, 2, 9, 200]))]
    body = {"messages": [*messages, {"role": "user", "content": _text(rng)}], **_generation(rng)}
    if rng.random() < 0.25:
        body |= _tools(rng)
    if rng.random() < 0.25:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": _schema(rng)}}
    if rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": _number(rng, 0, 20, whole=True)}
    return body


def _completion(rng: Random) -> dict[str, Any]:
    prompts: list[Callable[[], Any]] = [
        lambda: _text(rng),
        lambda: _ids(rng),
        lambda: [_text(rng) for _ in range(rng.choice([1, 8, 128]))],
    ]
    body = {"prompt": rng.choice(prompts)(), **_generation(rng)}
    if rng.random() < 0.3:
        body |= {"logprobs": _number(rng, 0, 20, whole=True), "echo": rng.random() < 0.5}
    return body


def _response(rng: Random) -> dict[str, Any]:
    shared = {"temperature", "top_p", "stream"}
    body = {name: value for name, value in _generation(rng).items() if name in shared}
    body |= {"input": _text(rng), "max_output_tokens": _number(rng, 1, 300, whole=True)}
    if rng.random() < 0.4:
        body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": _schema(rng)}}
    return body


def _embedding(rng: Random) -> dict[str, Any]:
    inputs = [_text(rng), _ids(rng), [_text(rng) for _ in range(rng.choice([1, 30, 128]))]]
    return {"input": rng.choice(inputs), "encoding_format": rng.choice(["float", "base64"])}


def _tokenize(rng: Random) -> dict[str, Any]:
    return {"prompt": _text(rng), "return_token_strs": True}


def _detokenize(rng: Random) -> dict[str, Any]:
    return {"tokens": _ids(rng) + [rng.choice(EDGES)] * (rng.random() < 0.3)}


ROUTES: dict[str, Callable[[Random], dict[str, Any]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/embeddings": _embedding,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
}


def mutated(body: dict[str, Any], rng: Random) -> dict[str, Any]:
    """Return the body with one value, anywhere in it, replaced, removed, added or blown up."""
    changed: dict[str, Any] = json.loads(json.dumps(body))
    at: Any = changed
    while True:  # a random place, often near the top
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            break
        key = rng.choice(keys)
        inner = at[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.5:
            at = inner
            continue
        what = rng.random()
        if what < 0.5:
            at[key] = rng.choice(STRANGE)
        elif what < 0.6:
            del at[key]
        elif what < 0.7:
            at[key] = nested(rng.choice([40, 5000]))
        elif what < 0.8:
            at[key] = "x" * rng.choice([1000, 4_000_000])
        elif what < 0.9:
            at[key] = [inner] * rng.choice([2, 3000])
        else:
            changed |= {f"unheard_{i}": i for i in range(rng.choice([1, 100_000]))}
        break
    return changed


def nested(depth: int) -> Any:
    """Return lists within lists."""
    value: Any = []
    for _ in range(min(depth, sys.getrecursionlimit() // 3)):
        value = [value]
    return value


BYTES: list[Callable[[bytes, Random], bytes]] = [
    lambda raw, rng: raw[: rng.randrange(len(raw))],
    lambda raw, rng: raw.replace(b'"', b"'"),
    lambda raw, rng: b"[" * 200_000 + b"]" * 200_000,
    lambda raw, rng: b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    lambda raw, rng: raw[:-1] + b',"seed":' + b"9" * 100_000 + b"}",
    lambda raw, rng: raw[:-1] + b',"temperature":NaN,"top_p":Infinity}',
    lambda raw, rng: raw[:-1] + b',"user":"\\ud800"}',
    lambda raw, rng: bytes(rng.randrange(256) for _ in range(200)),
    lambda raw, rng: raw + b" " * 3_000_000,
    lambda raw, rng: b"",
]
