"""Outputs that are either calls of tools, in a model's own format, or an answer in JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from engine.grammar.ebnf import Rules, either, literal, repeat
from engine.grammar.json_schema import schema_rules
from engine.grammar.json_text import any_object


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
    rules = Rules()
    arguments = rules.add(any_object(rules))
    answer = arguments if wanted.schema is None else schema_rules(wanted.schema, rules)
    call = rules.add(either(*[f"{literal(begin)} {arguments} {literal(end)}" for begin, end in wanted.calls]))
    more = repeat(f"{literal(wanted.between)} {call}", 0, None if wanted.many else 0)
    return rules.text(either(answer, f"{literal(wanted.opening)} {call} {more} {literal(wanted.closing)}"))
