"""Structured output of the demo model: what ends matches, what is cut can go on, and company changes nothing."""

import json
import re
from pathlib import Path
from random import Random

import jsonschema
import pytest

from engine.errors import InvalidRequestError
from engine.llm import LLM
from engine.request import Request
from engine.sampling_params import SamplingParams, StructuredOutput
from tests.grammar_walk import random_schema
from tests.long import examples

pytestmark = pytest.mark.usefixtures("one_thread")

DEMO = Path(__file__).parents[2] / "deploy" / "demo_model"
PROMPT = "import json\n\nexample = "
SCHEMA = StructuredOutput(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 12},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "tags": {"type": "array", "items": {"enum": ["x", "long one", "é"]}, "maxItems": 3},
            },
            "required": ["name", "age", "tags"],
        }
    ),
)


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO, device="cpu", dtype="float32", max_model_len=512, num_kv_blocks=3000, max_num_seqs=64) as one:
        yield one


def params(structured, **changes):
    return SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": 150, "structured": structured, **changes})


def follow(llm, structured, token_ids):
    """Return the state after these tokens; raises `GrammarError` if the grammar does not allow them."""
    return llm._grammars.compile(structured).resume(token_ids)


def tokens_of(results):
    return [[output.token_ids for output in result.outputs] for result in results]


def test_outputs_of_random_schemas_parse_and_validate(llm):
    rng = Random(12)
    schemas = [random_schema(rng) for _ in range(examples(200))]
    wanted = [StructuredOutput("json_schema", json.dumps(schema)) for schema in schemas]
    chosen = [
        params(each, temperature=0.0) if number % 3 == 0 else params(each, n=1 + number % 3, seed=number)
        for number, each in enumerate(wanted)
    ]
    ended = 0
    for schema, spec, result in zip(
        schemas, wanted, llm.generate([PROMPT] * len(chosen), chosen, use_tqdm=False), strict=True
    ):
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        for output in result.outputs:
            state = follow(llm, spec, output.token_ids)
            assert state.finished == (output.finish_reason == "stop")
            if output.finish_reason == "stop":
                validator.validate(json.loads(output.text))
                ended += 1
            else:
                assert output.finish_reason == "length"
    total = sum(one.n for one in chosen)
    assert ended > 0.9 * total


def test_regular_expressions_and_choices_match_as_a_whole(llm):
    patterns = [
        "[0-9]{3}-[a-f]{1,4}",
        '"[^"]{2,9}"',
        "(import|from) [a-z]{1,8}( as [a-z]{1,3})?",
        "(yes|no|maybe)!{0,3}",
    ]
    chosen = [params(StructuredOutput("regex", pattern), n=3) for pattern in patterns]
    for pattern, result in zip(patterns, llm.generate([PROMPT] * 4, chosen, use_tqdm=False), strict=True):
        for output in result.outputs:
            assert output.finish_reason == "stop"
            assert re.fullmatch(pattern, output.text)
    options = ["red", "green and blue", 'n"o\n', "日本"]
    for seed in range(4):
        wanted = params(StructuredOutput("choice", json.dumps(options)), n=3, seed=seed)
        (result,) = llm.generate(PROMPT, wanted, use_tqdm=False)
        assert {output.text for output in result.outputs} <= set(options)


def test_an_object_of_any_kind_and_a_grammar_hold(llm):
    wanted = [
        params(StructuredOutput("grammar", 'root ::= "f(" arg ("," arg){0,2} ")"\narg ::= [0-9]{1,3}\n'), n=2),
        params(StructuredOutput("json_object"), n=2, temperature=1.5, max_tokens=60),
    ]
    calls, objects = llm.generate([PROMPT] * 2, wanted, use_tqdm=False)
    assert all(re.fullmatch(r"f\(\d{1,3}(,\d{1,3}){0,2}\)", output.text) for output in calls.outputs)
    for output in objects.outputs:
        assert output.text.startswith("{")
        assert follow(llm, wanted[1].structured, output.token_ids).finished == (output.finish_reason == "stop")


def test_tokens_are_the_same_alone_and_in_company_and_bystanders_keep_theirs(llm):
    prompts = [PROMPT, "def main():\n", PROMPT, "x = "]
    plain = SamplingParams(temperature=0.9, seed=3, max_tokens=30)
    chosen = [params(SCHEMA, n=2), plain, params(StructuredOutput("regex", "[a-z]{5,20}"), temperature=0.0), plain]
    together = tokens_of(llm.generate(prompts, chosen, use_tqdm=False))
    alone = [tokens_of(llm.generate([p], [c], use_tqdm=False))[0] for p, c in zip(prompts, chosen, strict=True)]
    assert together == alone


def test_resumed_from_any_prefix_of_the_log_the_tokens_are_the_same(llm):
    (result,) = llm.generate(PROMPT, params(SCHEMA, n=2), use_tqdm=False)
    grammar = llm._grammars.compile(SCHEMA)
    logs = [output.token_ids for output in result.outputs]
    for cut in range(0, max(map(len, logs)), 5):
        resume = {choice: tuple(log[:cut]) for choice, log in enumerate(logs) if cut < len(log)}
        request = Request(f"cut at {cut}", tuple(result.prompt_token_ids), params(SCHEMA, n=2), seed=7, resume=resume)
        found = {choice: list(log) for choice, log in resume.items()}
        llm._core.add(request, grammar)
        while llm._core.has_unfinished:
            report = llm._core.step()
            for sequence, token in zip(report.sequences, report.token_ids, strict=True):
                found[sequence.index].append(token)
        assert found == {choice: logs[choice] for choice in resume}


def test_preempted_outputs_are_the_same(llm):
    chosen = [params(SCHEMA, n=2, seed=seed) for seed in range(6)]
    usual = tokens_of(llm.generate([PROMPT] * 6, chosen, use_tqdm=False))
    with LLM(
        DEMO, device="cpu", dtype="float32", max_model_len=256, num_kv_blocks=18, enable_prefix_caching=False
    ) as tight:
        cramped = tokens_of(tight.generate([PROMPT] * 6, chosen, use_tqdm=False))
        assert tight.stats().preemptions > 0
    assert cramped == usual


def test_a_schema_that_cannot_be_kept_to_names_its_request_and_nothing_runs(llm):
    bad = params(StructuredOutput("json_schema", '{"type": "array", "uniqueItems": true}'))
    with pytest.raises(InvalidRequestError, match="uniqueItems") as caught:
        llm.generate([PROMPT] * 2, [params(SCHEMA), bad], use_tqdm=False)
    assert caught.value.param == "sampling_params[1].structured"
    assert not llm._core.has_unfinished
