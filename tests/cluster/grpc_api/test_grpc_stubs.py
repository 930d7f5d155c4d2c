"""The committed gRPC modules are those of the `.proto`, and the `.proto` says what the HTTP API says."""

import pickle

from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.openai.embeddings import EmbeddingFields
from cluster.openai.request_fields import ChatFields, CompletionFields
from tests.grpc_codegen import NAMES, ROOT, generate

# Fields that only HTTP has, and why.
HTTP_ONLY = {
    "stream": "every answer streams",
    "stream_options": "usage always comes last",
    "return_token_ids": "output",
    "prompt_logprobs": "not told in streams",
    "echo": "clients have their prompt",
    "response_format": "sampling.structured_outputs",
    "top_logprobs": "sampling.logprobs",
    "max_completion_tokens": "sampling.max_tokens",
    "metadata": "a label that changes nothing",
    "safety_identifier": "a label that changes nothing",
    "prompt_cache_key": "a label that changes nothing",
    "encoding_format": "vectors are floats",
    "regex": "sampling.structured_outputs",
    "ebnf": "sampling.structured_outputs",
    "return_tokens_as_token_ids": "log-probabilities have token_id and token",
    "thinking_token_budget": "not there yet",
    "logprob_token_ids": "not there yet",
    "truncation_side": "not there yet",
    "truncate_prompt_tokens": "of embeddings not there yet",
    "include_reasoning": "thoughts are a field of their own",
    "separate_reasoning": "thoughts are a field of their own",
}


def names(message):
    """The fields of a request by their HTTP names, those of `sampling` among them."""
    fields = {field.name for field in message.DESCRIPTOR.fields}
    if "sampling" in fields:
        fields |= {field.name for field in pb.Sampling.DESCRIPTOR.fields}
    if "texts" in fields:
        fields = fields - {"texts", "token_ids"} | {"input"}
    return fields - {"sampling", "output", "prompt_token_ids"}


def test_the_generated_modules_are_up_to_date(tmp_path):
    generate(tmp_path)
    for name in NAMES:
        made, committed = tmp_path / "squadron/v1" / name, ROOT / "squadron/v1" / name
        assert made.read_text() == committed.read_text(), f"{name} is old: run `python -m tests.grpc_codegen`"


def test_each_field_of_the_http_api_is_here_or_is_known_not_to_be():
    for message, schema in (
        (pb.GenerateRequest, CompletionFields),
        (pb.ChatRequest, ChatFields),
        (pb.EmbedRequest, EmbeddingFields),
    ):
        known = set(schema.model_fields)
        assert names(message) <= known, "no field has a name of its own"
        assert known - names(message) <= set(HTTP_ONLY), message.DESCRIPTOR.name


def test_messages_travel_between_processes():
    request = pb.GenerateRequest(model="m", prompt="p", sampling=pb.Sampling(temperature=0.3))
    assert pickle.loads(pickle.dumps(request)) == request
