"""`tool_choice`: what it forces by grammar, which parser reads the answer, and what is refused."""

import json
import re

import jsonschema
import pytest
from tokenizers import AddedToken

from cluster.openai.parsers.reader import joined
from cluster.openai.parsers.tool_choice import hides_markers, placed_under, tool_use
from cluster.openai.parsers.tool_formats import HermesParser, MistralParser
from engine.errors import InvalidRequestError
from engine.grammar.json_schema import schema_grammar
from engine.text.tokenizer import Tokenizer
from tests import tiny_tokenizer

TREE = {
    "type": "object",
    "properties": {"size": {"$ref": "#/$defs/Size"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["size"],
    "$defs": {"Size": {"type": "integer"}},
}
NAMED = {"type": "object", "properties": {"size": {"$ref": "#/$defs/Size"}}, "$defs": {"Size": {"type": "string"}}}
TOOLS = {"tree": TREE, "named": NAMED, "now": None}


def schema_of(use):
    structured = use.structured()
    assert structured.kind == "json_schema"
    return json.loads(structured.text)


def fits(schema, value):
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def call(name, parameters):
    return {"name": name, "parameters": parameters}


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ([call("tree", {"size": 1, "kids": [{"size": 2}]}), call("now", {})], True),
        ([call("named", {"size": "big"})], True),
        ([], False),
        ([call("tree", {"size": "big"})], False),
        ([call("tree", {"size": 1, "kids": [{"size": "x"}]})], False),
        ([call("named", {"size": 1})], False),
        ([call("now", {"a": 1})], False),
        ([call("other", {})], False),
        ([{**call("now", {}), "more": 1}], False),
        (call("now", {}), False),
    ],
)
def test_a_required_choice_is_a_list_of_calls_each_with_its_own_functions_arguments(calls, right):
    assert fits(schema_of(tool_use(TOOLS, "required")), calls) is right


def test_one_call_at_most_where_parallel_calls_are_off():
    schema = schema_of(tool_use(TOOLS, "required", parallel=False))
    assert fits(schema, [call("now", {})])
    assert not fits(schema, [call("now", {}), call("now", {})])


def test_a_named_choice_is_the_arguments_of_that_function():
    schema = schema_of(tool_use(TOOLS, None, named="tree"))
    assert fits(schema, {"size": 1, "kids": []})
    assert not fits(schema, call("tree", {"size": 1}))
    assert not fits(schema_of(tool_use(TOOLS, None, named="now")), {"a": 1})


@pytest.mark.parametrize(
    ("use", "text", "right"),
    [
        (tool_use(TOOLS, "required"), [call("tree", {"size": 1, "kids": [{"size": 2}]}), call("now", {})], True),
        (tool_use(TOOLS, "required"), [call("named", {"size": 1})], False),
        (tool_use(TOOLS, "required", parallel=False), [call("now", {}), call("now", {})], False),
        (tool_use(TOOLS, None, named="tree"), {"size": 1, "kids": [{"size": 2}]}, True),
        (tool_use(TOOLS, None, named="tree"), {"kids": []}, False),
    ],
)
def test_the_engines_grammar_of_a_forced_call_takes_what_the_schema_takes(use, text, right):
    xgrammar = pytest.importorskip("xgrammar", reason="the extra 'structured' is not installed")
    accepts = pytest.importorskip("xgrammar.testing")._is_grammar_accept_string
    grammar = xgrammar.Grammar.from_ebnf(schema_grammar(use.structured().text))
    assert accepts(grammar, json.dumps(text)) is right


@pytest.mark.parametrize(
    ("use", "text", "found"),
    [
        (tool_use(TOOLS, "required"), '[{"name": "now", "parameters": {}}]', [("now", "{}")]),
        (tool_use(TOOLS, None, named="tree"), '{"size": 1}', [("tree", '{"size": 1}')]),
        (tool_use(TOOLS, "auto", parser=HermesParser), '<tool_call>{"name": "now"}</tool_call>', [("now", "{}")]),
    ],
)
def test_each_choice_has_the_parser_for_what_it_makes_the_model_write(use, text, found):
    parser = use.new_parser()
    content, calls = joined([parser.feed(text), parser.finish()])
    assert content == ""
    assert [(one.name, one.arguments) for one in calls] == found


@pytest.mark.parametrize(
    ("use", "text", "form"),
    [
        (tool_use(TOOLS, "auto", parser=HermesParser), '<tool_call>{"name": "now"}</tool_call>', "call_[0-9a-f]{24}"),
        (tool_use(TOOLS, "auto", parser=MistralParser), '[TOOL_CALLS][{"name": "now"}]', "[a-zA-Z0-9]{9}"),
    ],
)
def test_ids_of_calls_follow_from_the_name_of_their_choice_where_it_has_one(use, text, form):
    found = [_ids(use, name, 2 * text) for name in ("a", "a", "b", None, None)]
    assert found[0] == found[1]
    assert len({one for ids in found for one in ids}) == 8
    assert all(re.fullmatch(form, one) for ids in found for one in ids)


def test_a_forced_call_has_an_id_as_the_models_template_wants_it_back():
    for use, text in (
        (tool_use(TOOLS, "required", parser=MistralParser), '[{"name": "now", "parameters": {}}]'),
        (tool_use(TOOLS, None, named="now", parser=MistralParser), "{}"),
    ):
        assert re.fullmatch("[a-zA-Z0-9]{9}", _ids(use, "a", text)[0])


def _ids(use, name, text):
    parser = use.new_parser(name)
    return [one.id for one in joined([parser.feed(text), parser.finish()])[1]]


@pytest.mark.parametrize(("tools", "choice"), [({}, None), ({}, "auto"), ({}, "none"), (TOOLS, "none")])
def test_a_call_without_tools_or_with_none_has_no_parser(tools, choice):
    assert tool_use(tools, choice) is None


def test_a_free_choice_is_not_bound_by_a_grammar():
    assert tool_use(TOOLS, None, parser=HermesParser).structured() is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((TOOLS, "auto"), {}), "--tool-call-parser"),
        (((TOOLS, None), {}), "--tool-call-parser"),
        ((({}, "required"), {}), "needs tools"),
        (((TOOLS, None), {"named": "other"}), "'other'"),
    ],
)
def test_what_cannot_be_done_is_refused_by_the_fields_name(arguments, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        tool_use(*arguments[0], **arguments[1])
    assert caught.value.param == "tool_choice"


def test_schemas_too_large_or_too_deep_are_refused_by_the_fields_name():
    deep = {}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}}
    for schema in (deep, {"type": "object", "description": "x" * 2**17}):
        with pytest.raises(InvalidRequestError) as caught:
            tool_use({"f": schema}, "required").structured()
        assert caught.value.param == "tools"


def test_references_move_with_their_schema_and_data_that_looks_like_one_stays():
    schema = {
        "properties": {"$ref": {"$ref": "#/$defs/A"}, "b": {"$ref": "https://x.test/y"}},
        "items": [{"$ref": "#"}],
        "const": {"$ref": "#/a"},
        "$defs": {"A": {"enum": [{"$ref": "#"}]}},
    }
    assert placed_under("#/$defs/t", schema) == {
        "properties": {"$ref": {"$ref": "#/$defs/t/$defs/A"}, "b": {"$ref": "https://x.test/y"}},
        "items": [{"$ref": "#/$defs/t"}],
        "const": {"$ref": "#/a"},
        "$defs": {"A": {"enum": [{"$ref": "#"}]}},
    }


def test_special_tokens_are_kept_where_the_parser_looks_for_one(tmp_path):
    backend = tiny_tokenizer.byte_level()
    backend.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tokenizer = Tokenizer(str(tiny_tokenizer.save(backend, tmp_path)))
    assert hides_markers(MistralParser, tokenizer)
    assert not hides_markers(HermesParser, tokenizer)
    assert tool_use(TOOLS, "auto", parser=MistralParser).keeps_special_tokens(tokenizer)
    assert not tool_use(TOOLS, "required", parser=MistralParser).keeps_special_tokens(tokenizer)
