"""What a request's output must match, as the text of one grammar."""

from __future__ import annotations

import json

from engine.errors import InvalidRequestError
from engine.grammar.calls import calls_or_json_grammar
from engine.grammar.ebnf import Rules, either, literal
from engine.grammar.json_schema import object_grammar, schema_grammar
from engine.grammar.json_text import spell_raw
from engine.grammar.regex import convert
from engine.sampling_params import StructuredOutput

MAX_CHOICES = 1000


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
        rules = Rules()
        return rules.text(convert(wanted.text, spell_raw, rules).body)
    if wanted.kind == "choice":
        return Rules().text(either(*[literal(choice) for choice in _choices(wanted.text)]))
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
