"""Every numeric field at and beyond its bounds: it runs, or one 400 names it, soon, whatever the number."""

import asyncio
import json
import math
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cluster.openai.request_fields import ChatFields, CompletionFields
from tests.openai_app import MODEL, app_for, client_for, saying, served_model

INF = math.inf
# name -> (least, most, whole numbers only); None = no bound that a small number could meet
BOUNDS = {
    "n": (1, 128, True),
    "temperature": (0, 100, False),
    "top_p": (5e-324, 1, False),
    "top_k": (-1, 2**31 - 1, True),
    "min_p": (0, 1, False),
    "repetition_penalty": (0.01, 100, False),
    "presence_penalty": (-2, 2, False),
    "frequency_penalty": (-2, 2, False),
    "seed": (-(2**63), 2**63 - 1, True),
    "min_tokens": (0, 10, True),
    "max_tokens": (1, 2**31 - 1, True),
    "prompt_logprobs": (0, 20, True),
    "truncate_prompt_tokens": (1, 2**31 - 1, True),
    "priority": (-(2**31 - 1), 2**31 - 1, True),
    "logprobs": (0, 20, True),
    "top_logprobs": (0, 20, True),
    "max_completion_tokens": (1, 2**31 - 1, True),
}
CHAT_ONLY = {"top_logprobs", "max_completion_tokens"}
ALSO = {"truncate_prompt_tokens": {-1}}  # logprobs -1 is refused where the server tells fewer
LENGTHS = {"max_tokens", "max_completion_tokens"}  # what the context has no room for is told of the prompt
WRONG = ["5", "", True, False, [], {}, [1], {"a": 1}, math.nan, INF, -INF, 10**400, -(10**400), 10**30, 1e308, -1e308]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    model = served_model(tmp_path_factory.mktemp("model"))
    return app_for(saying(model, "ok"), model)


async def ask(app, name, value):
    """The answer to a request with one field set, and the seconds that it took."""
    body = {"model": MODEL, "max_tokens": 10, name: value}
    if name in CHAT_ONLY:
        body |= {"messages": [{"role": "user", "content": "hi"}]}
        if name == "top_logprobs":
            body["logprobs"] = True
        elif name == "max_completion_tokens":
            del body["max_tokens"]
        path = "/v1/chat/completions"
    else:
        body["prompt"] = "hi"
        path = "/v1/completions"
    content = json.dumps(body)  # with NaN and Infinity, as careless clients send them
    async with client_for(app) as client:
        start = time.perf_counter()
        answer = await client.post(path, content=content, headers={"content-type": "application/json"})
        return answer, time.perf_counter() - start


def allowed(name, value):
    least, most, whole = BOUNDS[name]
    if type(value) is not int and (whole or type(value) is not float):
        return False
    return least <= value <= most or value in ALSO.get(name, ())


def check(app, name, value):
    answer, _ = asyncio.run(ask(app, name, value))
    if allowed(name, value) and name in LENGTHS and value > 200:
        roomy = answer.status_code == 200 and value < 256
        assert roomy or answer.json()["error"]["code"] == "context_length_exceeded"
        return
    if allowed(name, value):
        assert answer.status_code == 200, (name, value, answer.text)
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name), (value, error)
    assert len(answer.content) < 1500


def test_no_numeric_field_is_without_bounds():
    numeric = set()
    for schema in (CompletionFields, ChatFields):
        fields = schema.model_json_schema()["properties"].items()
        for name, field in fields:
            kinds = {one.get("type") for one in field.get("anyOf", [field])}
            if kinds & {"integer", "number"}:
                numeric.add(name)
                assert {"minimum", "maximum"} <= set(field), name
    # Bounds of thinking are for models that tell it apart: tests/cluster/openai/test_thinking_budget.py.
    assert numeric == {*BOUNDS, "thinking_token_budget"}


@pytest.mark.parametrize("name", BOUNDS)
def test_the_bounds_themselves_run_and_what_lies_beyond_is_refused(app, name):
    least, most, whole = BOUNDS[name]
    values = [least, most, *ALSO.get(name, ())]
    beyond = [least - 1, most + 1] if whole else [math.nextafter(least, -INF), math.nextafter(most, INF)]
    for value in [*values, *beyond, -0.0, 5e-324, 1e-39, 1.5 if whole else "1.5", *WRONG]:
        check(app, name, value)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(BOUNDS)), value=st.integers() | st.floats() | st.integers(-5, 25))
@example(name="temperature", value=-0.0)
@example(name="n", value=2.0)
def test_any_number_runs_or_is_refused_by_name(app, name, value):
    check(app, name, value)


HUGE = [
    ("n", 10**9), ("max_tokens", 2**62), ("min_tokens", 2**62), ("top_k", 2**62), ("seed", 2**80),
    ("stop", ["x" * 256] * 4000), ("stop_token_ids", list(range(200_000))), ("bad_words", ["word"] * 100_000),
    ("logit_bias", {str(i): 1 for i in range(100_000)}), ("allowed_token_ids", [1] * 200_000),
    ("structured_outputs", {"choice": ["x"] * 200_000}), ("structured_outputs", {"regex": "(a+)+" * 100_000}),
    ("request_id", "x" * 1_000_000), ("cache_salt", "x" * 1_000_000), ("user", "x" * 1_000_000),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), HUGE, ids=lambda value: str(value)[:20])
def test_what_is_huge_is_refused_soon(app, name, value):
    answers = [asyncio.run(ask(app, name, value)) for _ in range(3)]
    for answer, _ in answers:
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].split(".")[0] == name
        assert len(answer.content) < 1500
    assert min(took for _, took in answers) < 0.5  # 50 ms on an idle core; these share two with other tests
