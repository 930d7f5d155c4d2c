"""`x-session-id` travels from the client, over HTTP and gRPC, to whoever chooses the replica, and to nothing else."""

from __future__ import annotations

import grpc
import pytest

from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from tests.grpc_client import gathered, refusal_of, serving_grpc
from tests.openai_app import MODEL, app_for, client_for, saying, served_model

BODIES = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
    "/v1/embeddings": {"input": "hello"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("route", BODIES)
async def test_the_header_reaches_the_token_source_on_every_route(model, route):
    source = saying(model, "fine")
    async with client_for(app_for(source, model)) as client:
        for headers in ({"x-session-id": "talk-1"}, {}):
            answer = await client.post(route, json={"model": MODEL, **BODIES[route]}, headers=headers)
            assert answer.status_code == 200, answer.text
    assert [context.session_id for context in source.contexts] == ["talk-1", ""]


async def test_a_session_id_that_is_none_is_a_400_that_names_the_header(model):
    async with client_for(app_for(saying(model, "fine"), model)) as client:
        answer = await client.post("/v1/completions", json={"model": MODEL}, headers={"x-session-id": "a b"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-session-id"


async def test_grpc_metadata_carries_it_too(model):
    source = saying(model, "fine")
    asked = pb.GenerateRequest(model=MODEL, prompt="hello")
    async with serving_grpc(source, model) as served:
        await gathered(served.stub.Generate(asked, metadata=(("x-session-id", "talk-2"),)))
        refusal = await refusal_of(served.stub.Generate(asked, metadata=(("x-session-id", "a b"),)))
    assert [context.session_id for context in source.contexts] == ["talk-2"]
    assert (refusal.status, refusal.param) == (grpc.StatusCode.INVALID_ARGUMENT, "x-session-id")
