"""Structured output over HTTP, from replicas that are Ray actors with compilers of their own."""

import json

import httpx

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def complete(app, **fields):
    body = {"model": "demo", "prompt": "x = ", "max_tokens": 60, "seed": 1, **fields}
    return httpx.post(f"{app.url}/v1/completions", json=body, timeout=120)


def test_a_schema_is_kept_to_and_one_that_cannot_be_is_refused(demo_app):
    answer = complete(demo_app, n=3, structured_outputs={"json": SCHEMA})
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        value = json.loads(choice["text"])
        assert set(value) == {"name", "n"}
        assert len(value["name"]) <= 8
        assert 0 <= value["n"] <= 99
    refused = complete(demo_app, structured_outputs={"json": {"type": "array", "uniqueItems": True}})
    assert refused.status_code == 400
    assert "uniqueItems" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"].startswith("structured_outputs")
