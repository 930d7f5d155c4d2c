"""Every name that spans bear. OpenTelemetry's where there is one, ours (`squadron.*`) where there is none.

Source: OpenTelemetry semantic conventions 1.39+, GenAI, HTTP, RPC, error and server; a test compares these with the
package `opentelemetry-semantic-conventions`. They are written out here so that nothing is imported for them.
"""

from __future__ import annotations

from collections.abc import Mapping

# Of a generation.
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_SEED = "gen_ai.request.seed"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
# Of a call at an ingress.
HTTP_REQUEST_METHOD = "http.request.method"
HTTP_RESPONSE_STATUS_CODE = "http.response.status_code"
HTTP_ROUTE = "http.route"
URL_PATH = "url.path"
URL_SCHEME = "url.scheme"
RPC_SYSTEM_NAME = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_RESPONSE_STATUS_CODE = "rpc.response.status_code"
ERROR_TYPE = "error.type"
# Of a process.
SERVICE_NAME = "service.name"
SERVICE_VERSION = "service.version"
SERVICE_INSTANCE_ID = "service.instance.id"

# What the conventions have no name for.
REQUEST_ID = "squadron.request.id"
CLIENT_REQUEST_ID = "squadron.request.client_id"
TENANT = "squadron.tenant"
ROLE = "squadron.role"  # of a process: router or replica
REPLICA_ID = "squadron.replica.id"
ATTEMPT_NUMBER = "squadron.attempt.number"  # 1 = the first
ATTEMPT_RESUMED_TOKENS = "squadron.attempt.resumed_tokens"  # output tokens that an attempt came with
MIGRATIONS = "squadron.migrations"
REASON = "squadron.reason"  # of a migration or a wait, in words
DEVICE_SECONDS = "squadron.usage.device_seconds"
BLOCK_SECONDS = "squadron.usage.block_seconds"
COMPUTED_TOKENS = "squadron.prefill.computed_tokens"
CACHED_TOKENS = "squadron.prefill.cached_tokens"
DECODED_TOKENS = "squadron.decode.tokens"
PREEMPTIONS = "squadron.preemptions"
FINISH_REASONS = "squadron.finish_reasons"  # of a replica's attempt: abort = its router wanted no more

PROVIDER = "squadron"
CHAT, TEXT_COMPLETION, EMBEDDINGS = "chat", "text_completion", "embeddings"  # operations
CANCELLED = "cancelled"  # error type of a call whose client left

# Spans beneath the one of an ingress and the `{operation} {model}` of a router.
TURN = "turn"  # in a router: of the tenant
REPLICA_WAIT = "replica wait"  # in a router: for a replica that takes it
ATTEMPT = "attempt"
MIGRATE = "migrate"
GRAMMAR = "grammar"  # in a replica, as all that follow
QUEUE = "queue"
PREFILL = "prefill"
DECODE = "decode"
PREEMPTED = "preempted"
ENGINE = "engine"  # in place of the phases, where the engine died and can report none

# The routes of HTTP and the methods of gRPC that are traced, with the operation of each.
HTTP_OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT_COMPLETION,
    "/v1/responses": CHAT,
    "/v1/messages": CHAT,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/score": EMBEDDINGS,
    "/score": EMBEDDINGS,
    "/v1/rerank": EMBEDDINGS,
    "/v2/rerank": EMBEDDINGS,
    "/rerank": EMBEDDINGS,
    "/invocations": CHAT,  # until it is known what its body is for
}
RPC_OPERATIONS: Mapping[str, str] = {"Chat": CHAT, "Generate": TEXT_COMPLETION, "Embed": EMBEDDINGS}
