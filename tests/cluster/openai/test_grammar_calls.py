"""Outputs that are a call or an answer: every text that is allowed is read as one of them, in every format."""

import json

import jsonschema
import pytest

from cluster.openai.parsers.reader import joined
from cluster.openai.parsers.tool_choice import ToolUse
from cluster.openai.parsers.tool_formats import HermesParser, ListedParser, Llama3JsonParser, MistralParser
from engine.errors import InvalidRequestError
from engine.grammar.texts import grammar_text
from engine.sampling_params import StructuredOutput
from engine.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.grammar_walk import END, compiled, texts

NAMES = {"now": None, "get-weather": {"type": "object", "uniqueItems": True}}
SCHEMA = {"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"]}
LIST = {"type": "array", "items": {"type": "integer"}, "maxItems": 2}
FORMATS = [HermesParser, Llama3JsonParser, MistralParser, ListedParser]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(str(tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path_factory.mktemp("model"))))


def bound(kind, tokenizer, answer, parallel=True):
    return ToolUse("auto", NAMES, kind, parallel).or_answer(answer, tokenizer)


def schema(value):
    return StructuredOutput("json_schema", json.dumps(value))


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("answer", [SCHEMA, LIST], ids=["object", "list"])
@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_written_is_calls_or_matches_the_schema(tokenizer, kind, answer, parallel):
    use, wanted = bound(kind, tokenizer, schema(answer), parallel)
    found = {"calls": 0, "answers": 0}
    for text in texts(compiled(grammar_text(wanted)), 60):
        parser = use.new_parser()
        content, calls = joined([parser.feed(text.decode()), parser.finish()])
        if calls:
            assert content == ""
            assert {call.name for call in calls} <= set(NAMES)
            assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
            assert parallel or len(calls) == 1
        else:
            assert content == text.decode()
            jsonschema.validate(json.loads(content), answer)
        found["calls" if calls else "answers"] += 1
    assert min(found.values()) > 1


@pytest.mark.parametrize("kind", FORMATS)
def test_calls_that_the_format_shows_are_allowed_and_nothing_may_stand_before_them(tokenizer, kind):
    use, wanted = bound(kind, tokenizer, StructuredOutput("json_object"))
    grammar = compiled(grammar_text(wanted))
    written = {
        HermesParser: '<tool_call>\n{"name": "now", "arguments": {"a": [1]}}\n</tool_call>',
        Llama3JsonParser: '{"name": "now", "parameters": {"a": [1]}}',
    }.get(kind, '[{"name": "now", "arguments": {"a": [1]}}]')
    for text, fits in ((written, True), ('{"a": 1}', True), (f"So: {written}", False), ("[1]", False)):
        state = grammar.state()
        assert all(state.accept(token) for token in [*text.encode(), END]) is fits
    parser = use.new_parser()
    _, calls = joined([parser.feed(written), parser.finish()])
    assert [(call.name, call.arguments) for call in calls] == [("now", '{"a": [1]}')]


@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_that_the_limit_cuts_is_no_content(tokenizer, parallel):
    use, _ = bound(HermesParser, tokenizer, StructuredOutput("json_object"), parallel)
    text = '<tool_call>\n{"name": "now", "arguments": {"a": "b"}}\n</tool_call>'
    seen = set()
    for size in range(len(text + text) + 1):
        parser = use.new_parser()
        content, calls = joined([parser.feed((text + text)[:size]), parser.finish()])
        assert content == ""
        seen |= {(len(calls), call.arguments) for call in calls[-1:]}
    assert {(1, ""), (1, "{"), (1, '{"a": "b"}')} < seen
    assert any(count == 2 for count, _ in seen) is parallel


def test_a_schema_that_cannot_be_enforced_is_refused_as_the_answers(tokenizer):
    use, wanted = bound(HermesParser, tokenizer, schema({"type": "array", "uniqueItems": True}))
    with pytest.raises(InvalidRequestError, match="json_schema at #/uniqueItems") as caught:
        grammar_text(wanted)
    assert use.explained(str(caught.value)) == str(caught.value)


def test_names_and_a_schema_that_are_too_large_together_are_refused_by_the_fields_name(tokenizer):
    large = schema({"description": "x" * 65_000})
    with pytest.raises(InvalidRequestError, match="together") as caught:
        ToolUse("auto", {f"{n:060}": None for n in range(128)}, HermesParser).or_answer(large, tokenizer)
    assert caught.value.param == "tools"
