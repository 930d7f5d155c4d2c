"""Events of what is kept are numbered by tokens: however these come, and whoever makes the answer again."""

import json
import re

import pytest

from tests.cluster.ingress.test_answers_made_again import ASKED, GoingOn
from tests.cluster.openai.test_openai_chat_tools import model
from tests.openai_app import app_for, client_for

__all__ = ["model"]  # a fixture


async def frames(model, kind, chunk):
    path, text, asked = ASKED[kind]
    tokens = [*model.tokenizer.encode(text), model.tokenizer.eos_token_id]
    # The choices come in another order where they come in other pieces.
    source = GoingOn(lambda _, choice: tokens[choice:], eos=model.tokenizer.eos_token_id, chunk=chunk)
    async with client_for(app_for(source, model)) as client:
        answer = await client.post(path, json=asked, headers={"idempotency-key": "one"})
    assert answer.status_code == 200, answer.text
    found = answer.text.split("\n\n")[:-1]
    assert [frame.partition("\n")[0] for frame in found] == [f"id: {number}" for number in range(len(found))]
    return [re.sub(r'"(created|created_at|completed_at)":\d+', "", frame) for frame in found]


KEPT = [kind for kind, (path, *_) in ASKED.items() if path != "/v1/messages" and kind != "usage as it grows"]


@pytest.mark.parametrize("kind", KEPT)
async def test_the_numbers_do_not_depend_on_how_tokens_came(model, kind):
    one = await frames(model, kind, 1)
    assert len(one) > 10
    for chunk in (2, 3, 7, 1000):
        assert await frames(model, kind, chunk) == one


async def test_an_answer_without_a_key_has_no_ids(model):
    path, text, asked = ASKED["one call"]
    tokens = [*model.tokenizer.encode(text), model.tokenizer.eos_token_id]
    async with client_for(app_for(GoingOn(lambda *_: tokens, eos=tokens[-1]), model)) as client:
        answer = await client.post(path, json=asked)
    assert not re.search("^id:", answer.text, re.MULTILINE)
    assert json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))["id"].startswith("chatcmpl-")
