"""The whole API on a real Ray Serve app: structured output, embeddings, responses, prompts, tokens, the page."""

from __future__ import annotations

import json
import math
import re

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.harness import App, eventually, gone, kill, router_processes

PROMPT = "def main():\n"
MESSAGES = [{"role": "user", "content": "What does os.path.join do?"}]


class Function(BaseModel):
    """What an answer must be."""

    name: str = Field(max_length=12)
    arguments: list[str] = Field(max_length=2)
    lines: int = Field(ge=1, le=99)


@pytest.fixture(scope="module")
def client(demo_app: App) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo_app.url}/v1", api_key="none", max_retries=0)


def test_a_schema_is_kept_by_every_choice_and_parsed_by_the_client(client: openai.OpenAI) -> None:
    schema = Function.model_json_schema()
    schema["properties"]["arguments"]["items"]["maxLength"] = 6
    schema |= {"required": list(schema["properties"]), "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "function", "strict": True, "schema": schema}}
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, response_format=wanted, n=3, seed=5, temperature=1.0, max_tokens=120
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)
        Function.model_validate_json(choice.message.content)


def test_expressions_and_choices_are_kept_and_what_cannot_be_is_refused_by_name(client: openai.OpenAI) -> None:
    def ask(**structured):
        extra = {"structured_outputs": structured}
        return client.completions.create(model="demo", prompt=PROMPT, max_tokens=40, extra_body=extra).choices[0].text

    assert re.fullmatch(r"[a-f]{4}-\d\d", ask(regex=r"[a-f]{4}-\d\d"))
    assert ask(choice=["red", "green"]) in ("red", "green")
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        ask(json={"type": "array", "uniqueItems": True})
    with pytest.raises(openai.BadRequestError, match="a group is not closed") as caught:
        ask(regex="(")
    assert caught.value.param == "structured_outputs"
    with pytest.raises(openai.BadRequestError, match="guided_json") as caught:
        client.completions.create(model="demo", prompt=PROMPT, extra_body={"guided_json": {}})
    assert "structured_outputs" in str(caught.value)


def test_embeddings_are_normalised_and_the_same_in_both_encodings(client: openai.OpenAI) -> None:
    texts = ["import os", "import sys", "class Stack:\n    pass"]
    plain = client.embeddings.create(model="demo", input=texts, encoding_format="float")
    packed = client.embeddings.create(model="demo", input=texts)
    for one, other in zip(plain.data, packed.data, strict=True):
        assert math.isclose(sum(x * x for x in one.embedding), 1, rel_tol=1e-4)
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)

    def likeness(a: int, b: int) -> float:
        return sum(x * y for x, y in zip(plain.data[a].embedding, plain.data[b].embedding, strict=True))

    assert likeness(0, 1) > likeness(0, 2)


def test_responses_stream_what_they_answer(client: openai.OpenAI) -> None:
    arguments = {"model": "demo", "input": MESSAGES, "temperature": 0, "max_output_tokens": 100, "store": False}
    whole = client.responses.create(**arguments)
    events = list(client.responses.create(**arguments, stream=True))
    assert events[-1].type == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_messages_stream_what_they_answer(demo_app: App) -> None:
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    url = f"{demo_app.url}/v1/messages"
    whole = httpx.post(url, json=body, timeout=60).json()
    counted = httpx.post(f"{url}/count_tokens", json={"model": "demo", "messages": MESSAGES}).json()
    answer = httpx.post(url, json=body | {"stream": True}, timeout=60)
    events = [
        json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n") if line.startswith("data: ")
    ]
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == whole["content"][0]["text"] != ""
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"] <= 40
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]
    assert answer.headers["request-id"] == events[0]["message"]["id"]
    refused = httpx.post(url, json=body | {"model": "other"}).json()
    assert (refused["type"], refused["error"]["type"]) == ("error", "not_found_error")


def test_texts_are_scored_by_their_embeddings(demo_app: App) -> None:
    body = {"model": "demo", "query": PROMPT, "documents": ["import os\n", PROMPT]}
    results = httpx.post(f"{demo_app.url}/v1/rerank", json=body, timeout=60).json()["results"]
    assert results[0]["index"] == 1
    assert results[0]["relevance_score"] == pytest.approx(1.0, abs=1e-3)
    assert results[1]["relevance_score"] < results[0]["relevance_score"]


def test_a_prompt_is_scored_echoed_and_counted_the_same_each_time(demo_app: App, client: openai.OpenAI) -> None:
    asked = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 4, "prompt_logprobs": 1}
    first, again = (httpx.post(f"{demo_app.url}/v1/completions", json=asked).json()["choices"][0] for _ in range(2))
    assert first["prompt_logprobs"] == again["prompt_logprobs"]
    tokens = httpx.post(f"{demo_app.url}/tokenize", json={"model": "demo", "prompt": PROMPT}).json()
    assert first["prompt_logprobs"][0] is None
    assert len(first["prompt_logprobs"]) == tokens["count"]
    told = zip(tokens["tokens"][1:], first["prompt_logprobs"][1:], strict=True)
    assert all(str(token) in entry for token, entry in told)
    text = httpx.post(f"{demo_app.url}/detokenize", json={"model": "demo", "tokens": tokens["tokens"]}).json()
    assert text["prompt"] == "<|bos|>" + PROMPT
    echoed = client.completions.create(model="demo", prompt=PROMPT, echo=True, max_tokens=4, temperature=0)
    assert echoed.choices[0].text == PROMPT + first["text"]


def test_a_bias_decides_and_a_bad_word_never_comes(client: openai.OpenAI) -> None:
    forced = client.completions.create(model="demo", prompt=PROMPT, max_tokens=3, logit_bias={"300": 100})
    assert len(set(forced.choices[0].text)) <= len(forced.choices[0].text) / 2
    free = client.completions.create(model="demo", prompt=PROMPT, max_tokens=16, temperature=0).choices[0].text
    word = free.split()[2]
    extra = {"bad_words": [word]}
    ruled = client.completions.create(model="demo", prompt=PROMPT, max_tokens=16, temperature=0, extra_body=extra)
    assert word in free
    assert word not in ruled.choices[0].text


def test_files_and_batches_outlive_their_router(client: openai.OpenAI, demo_app: App) -> None:
    content = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n' * 40_000
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert client.files.content(file.id).content == content
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    (router,) = router_processes()
    kill(router)
    eventually(lambda: gone(router.pid), "the router is dead")
    demo_app.wait_whole()
    assert client.batches.retrieve(made.id).created_at == made.created_at
    assert file.id in [one.id for one in client.files.list()]
    # All its rows have one id.
    eventually(lambda: client.batches.retrieve(made.id).status == "failed", "the batch has ended")
    assert "custom_id '1'" in client.batches.retrieve(made.id).errors.data[0].message
    assert next(iter(client.batches.list(limit=1))).status == "failed"
    assert client.files.delete(file.id).deleted


def test_the_page_the_version_and_the_document_are_there(demo_app: App) -> None:
    assert httpx.get(f"{demo_app.url}/ui").headers["content-type"].startswith("text/html")
    assert httpx.get(f"{demo_app.url}/version").json()["version"]
    paths = httpx.get(f"{demo_app.url}/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize"} <= set(paths)
    assert "/v1/messages" in httpx.get(f"{demo_app.url}/docs").text
    assert httpx.get(f"{demo_app.url}/ping").status_code == 200
