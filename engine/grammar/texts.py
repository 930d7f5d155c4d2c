"""From a wanted output to the text of its grammar, and to a form without the client's words that may be logged."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from engine.errors import InvalidRequestError
from engine.grammar.gbnf import GrammarRules, either, literal, repeat
from engine.grammar.json_schema import object_grammar, schema_grammar, schema_rules
from engine.grammar.json_text import any_object, spell_raw
from engine.grammar.regex import convert
from engine.grammar.schema_check import ANNOTATIONS, ENFORCED, FORMATS, REFUSED, TYPES
from engine.sampling_params import StructuredOutput

MAX_CHOICES = 1000
MOST = 1000  # characters
_KEYWORDS = {*ENFORCED, *REFUSED}
_OPEN_WORDS = {*TYPES, *FORMATS}
_NAMED = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_COUNTED = ("enum", "required", "const", "$ref", "pattern")
_COUNT_OR_WORD = re.compile(r"\{\d+(?:,\d*)?\}|\w")


@dataclass(frozen=True, slots=True)
class CallsOrJson:
    """What `StructuredOutput("calls_or_json")` says.

    calls: for each tool what stands before and behind its arguments, which are any JSON object. opening, between and
    closing: what stands around the calls. many: whether there may be more than one. schema: the text of the JSON
    schema of an answer, None = any object.
    """

    calls: tuple[tuple[str, str], ...]
    opening: str = ""
    between: str = ""
    closing: str = ""
    many: bool = True
    schema: str | None = None

    def text(self) -> str:
        """Return this as the text of a `StructuredOutput`."""
        return json.dumps(asdict(self), ensure_ascii=False)


def calls_or_json_grammar(text: str) -> str:
    """Return the grammar of `CallsOrJson.text`; raises `InvalidRequestError` naming what cannot be enforced."""
    wanted = CallsOrJson(**json.loads(text))
    rules = GrammarRules()
    arguments = rules.add(any_object(rules))
    answer = arguments if wanted.schema is None else schema_rules(wanted.schema, rules)
    call = rules.add(either(*[f"{literal(begin)} {arguments} {literal(end)}" for begin, end in wanted.calls]))
    more = repeat(f"{literal(wanted.between)} {call}", 0, None if wanted.many else 0)
    return rules.text(either(answer, f"{literal(wanted.opening)} {call} {more} {literal(wanted.closing)}"))


def grammar_text(wanted: StructuredOutput) -> str:
    """Return the grammar (GBNF) of the texts that are wanted.

    Raises `InvalidRequestError` naming what cannot be read, or not be enforced.
    """
    if wanted.kind == "json_schema":
        return schema_grammar(wanted.text)
    if wanted.kind == "json_object":
        return object_grammar()
    if wanted.kind == "calls_or_json":
        return calls_or_json_grammar(wanted.text)
    if wanted.kind == "regex":
        rules = GrammarRules()
        return rules.text(convert(wanted.text, spell_raw, rules).body)
    if wanted.kind == "choice":
        return GrammarRules().text(either(*[literal(choice) for choice in _choices(wanted.text)]))
    return wanted.text


def _choices(text: str) -> list[str]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"choice must be a JSON list of strings: {error}", "structured") from error
    if not isinstance(found, list) or not found or any(not isinstance(each, str) or not each for each in found):
        raise InvalidRequestError("choice must be a JSON list of strings that are not empty", "structured")
    if len(found) > MAX_CHOICES:
        raise InvalidRequestError(f"choice takes at most {MAX_CHOICES} strings, not {len(found)}", "structured")
    if any(0xD800 <= ord(char) <= 0xDFFF for each in found for char in each):
        raise InvalidRequestError("choice is not valid Unicode: half of a surrogate pair", "structured")
    return list(dict.fromkeys(found))


def shape(wanted: StructuredOutput) -> str:
    """Return the kind and form of what is wanted, at most `MOST` characters.

    Keywords, types and numbers of a schema are kept; names, constants and patterns become their count or length.
    Of other texts the signs and counts are kept, each letter and digit is an x.
    """
    if wanted.kind == "json_schema":
        try:
            form = json.dumps(_form(json.loads(wanted.text)))
        except (ValueError, RecursionError):
            form = f"{len(wanted.text)} characters"
    else:
        form = _COUNT_OR_WORD.sub(lambda found: found[0] if found[0][0] == "{" else "x", wanted.text)
    return f"{wanted.kind} {form}"[:MOST].replace("\n", " ").strip()


def _form(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_form(each) for each in schema]
    if not isinstance(schema, dict):
        return schema if isinstance(schema, bool) else _word(schema)
    return {
        name if name in _KEYWORDS else "?": _part(name, value)
        for name, value in schema.items()
        if name not in ANNOTATIONS
    }


def _part(name: str, value: Any) -> Any:
    if name in _NAMED and isinstance(value, dict):
        return {f"#{number}": _form(each) for number, each in enumerate(value.values())}
    if name in _COUNTED or name not in _KEYWORDS:
        return len(value) if isinstance(value, str | list | dict) else _word(value)
    return [_form(each) for each in value] if isinstance(value, list) else _form(value)


def _word(value: Any) -> Any:
    if isinstance(value, str):
        return value if value in _OPEN_WORDS else len(value)
    return value
