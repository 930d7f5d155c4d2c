"""A request that fails at any stage in the front end leaves the 31 others that run beside it exact."""

import asyncio

import pytest

from cluster.http import endpoints
from cluster.openai import frames, generation, validation
from cluster.router.models import Models
from engine.text.tokenizer import Tokenizer
from tests.fake_source import FakeSource
from tests.openai_app import MODEL, app_for, client_for, events, served_model

POISON = 666  # the seed of the request that fails
BYSTANDERS = 31


class PoisonError(Exception):
    """What no code of ours expects."""


def failing(function, is_poisoned):
    """`function`, but for the poisoned request it raises."""

    def call(*args, **kwargs):
        if is_poisoned(*args):
            raise PoisonError("secret")
        return function(*args, **kwargs)

    return call


# Each stage by which a request passes: where its function is, and how it is told that this is the poisoned one.
STAGES = {
    "read": (endpoints, "parse_json", lambda body: b"666" in body),
    "model": (Models, "of", lambda _, fields: fields["seed"] == POISON),
    "validate": (validation, "conversation_of", lambda checked, *_: checked.seed == POISON),
    "render": (Tokenizer, "render_chat", lambda _, messages: messages[0]["content"] == str(POISON)),
    "tokenize": (Tokenizer, "encode", lambda _, text: str(POISON) in text),
    "bad words": (Tokenizer, "with_bad_words", lambda _, params: params.seed == POISON),
    "detokenizer": (Tokenizer, "text_streams", lambda _, params, ids: params.seed == POISON),
    "generation": (generation, "openings", lambda call, *_: call.seed == POISON),
    "frames": (frames.Frames, "__init__", lambda _, call, *rest: call.seed == POISON),
    "frame": (frames.ChatFrames, "_frames", lambda self, delta: self._call.seed == POISON),
    "logprobs": (frames.ChatFrames, "_logprobs", lambda self, delta: self._call.seed == POISON),
    "usage": (endpoints, "_stream", lambda call, *rest: call.seed == POISON),
    "source": (FakeSource, "_plan", lambda _, request, choice: request.seed == POISON),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


async def ask(client, seed):
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": str(seed)}],
        "seed": seed,
        "stream": True,
        "logprobs": True,
        "bad_words": ["x"],
    }
    return await client.post("/v1/chat/completions", json=body)


def text_of(answer):
    chunks = events(answer.text)
    assert chunks.pop() == "[DONE]"
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


@pytest.mark.parametrize("stage", STAGES)
async def test_bystanders_get_exactly_their_own(model, monkeypatch, stage):
    where, name, is_poisoned = STAGES[stage]
    eos = model.tokenizer.eos_token_id
    said = {seed: f"answer {seed} 🚀 and more" for seed in [*range(100, 100 + BYSTANDERS), POISON]}
    tokens = {seed: [*model.tokenizer.encode(text), eos] for seed, text in said.items()}
    source = FakeSource(lambda request, _: tokens[request.seed], eos=eos)
    monkeypatch.setattr(where, name, failing(getattr(where, name), is_poisoned))
    async with client_for(app_for(source, model)) as client:
        answers = await asyncio.gather(*[ask(client, seed) for seed in said])
    *others, poisoned = answers
    assert [text_of(answer) for answer in others] == [said[seed] for seed in said if seed != POISON]
    error = poisoned.json() if poisoned.status_code != 200 else events(poisoned.text)[-1]
    assert poisoned.status_code in (200, 400, 500)
    assert error["error"]["code"] in ("internal_error", "chat_template_error")
    assert "secret" not in poisoned.text
    assert len(source.closed) == len(source.requests)
