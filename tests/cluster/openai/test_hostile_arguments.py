"""Whatever a model writes as the arguments of a call is an answer, in JSON that every client reads."""

import json
import re
from dataclasses import replace

import pytest

from cluster.config_values import TOOL_PARSERS
from tests.cluster.anthropic.messages_lab import model_with
from tests.openai_app import MODEL, app_for, client_for, saying

TAG = "<tool_call>"
NAMED = f'{TAG}{{"name": "f", "arguments": '
# How each format writes a call of `f` with one argument; of the others, JSON goes through as it was written.
FORMS = [
    ("glm45", f"{TAG}f<arg_key>a</arg_key><arg_value>%s</arg_value></tool_call>"),
    ("qwen3_coder", f"{TAG}<function=f><parameter=a>%s</parameter></function></tool_call>"),
    ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">%s</parameter></invoke>'),
    ("gemma4", "<|tool_call>call:f{a:%s}<tool_call|>"),
    ("pythonic", "[f(a=%s)]"),
    ("hermes", NAMED + '{"a": %s}}</tool_call>'),
    ("hermes", NAMED + '"{\\"a\\": %s}"}</tool_call>'),
    ("llama3_json", '{"parameters": {"a": %s}, "name": "f"}'),
]
WRITTEN = [FORMS[0], FORMS[4]]  # by us; what differs between the APIs is the same for all of them
VALUES = {
    "half a pair": r'"\ud800"',
    "half a pair in a key": r'{"\udc00": 1}',
    "many digits": "7" * 4400,  # Python reads and writes 4,300
    "hexadecimal": "0x" + "f" * 4000,
    "beyond a float": "[1e999]",
    "beyond a float, negative": "-1e999",
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "negative zero": "-0",
    "a key twice": '{"b": 1, "b": 2}',
    "deep": "[" * 200 + "]" * 200,
    "NUL": r'"\u0000"',
}
USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {}}
ASKED = {
    "/v1/chat/completions": {"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]},
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}]},
    "/v1/messages": {"messages": USER, "max_tokens": 9000, "tools": [{"name": "f", "input_schema": PARAMETERS}]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return replace(model_with(tmp_path_factory.mktemp("model")), max_model_len=20_000)


def read(text: str):
    """JSON as strict clients read it: in UTF-8, and without NaN."""
    return json.loads(text.encode(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"), parse_int=str)


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
async def test_arguments_of_any_value_are_an_answer(model, path, value):
    for name, form in FORMS if path == "/v1/chat/completions" else WRITTEN:
        quote = '<|"|>' if name == "gemma4" else r"\"" if r"\"" in form else '"'
        shown = value.replace('"', quote)
        serving = replace(model, tool_parser=TOOL_PARSERS.load(name))
        async with client_for(app_for(saying(serving, form % shown, chunk=64), serving)) as client:
            whole = await client.post(path, json={"model": MODEL} | ASKED[path])
            streamed = await client.post(path, json={"model": MODEL, "stream": True} | ASKED[path])
        assert whole.status_code == 200, (name, whole.text)
        read(whole.text)
        events = [read(data) for data in re.findall(r"^data: (\{.*)$", streamed.text, re.MULTILINE)]
        assert not any(event.get("error") for event in events), (name, events[-1])
        if path == "/v1/chat/completions" and name != "hermes":
            for call in whole.json()["choices"][0]["message"].get("tool_calls") or ():
                read(call["function"]["arguments"])
