"""Between the engine's objects and what travels: requests, figures, block names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec
import numpy as np

from cluster.accounts.costs import MAX_TENANTS, NANOS, OTHERS, EngineCosts, EngineUsage
from cluster.accounts.flight_recorder import WaitEvent
from cluster.wire.parts import MAX_TEXT, Counted, Load, ReplicaCosts, ResourceUsage, TraceContext, Waited
from cluster.wire.replica_messages import PooledRow, PromptRow
from cluster.wire.router_messages import Submit
from engine.errors import InvalidRequestError
from engine.report import EngineStats, Floats, PromptLogprobs, TokenLogprob
from engine.request import Request
from engine.sampling_params import SamplingParams

HASH_KEY_BYTES = 8
NOTHING: Mapping[str, float] = MappingProxyType({})
UNCOUNTED: Mapping[str, Counted] = MappingProxyType({})

_PARAMS_ENCODER = msgspec.msgpack.Encoder()
_PARAMS_DECODER = msgspec.msgpack.Decoder(SamplingParams)


def submit_message(
    request: Request,
    stream: int,
    resume: dict[int, tuple[int, ...]] | None = None,
    scored: int | None = None,
    now: float = 0.0,
    story: Sequence[WaitEvent] = (),
    trace: TraceContext | None = None,
    retried: bool = False,
) -> Submit:
    """Return the message that starts an attempt of `request`; `resume` and `scored` take the place of its own.

    now: seconds on the clock of its deadline and of its `story`.
    """
    return Submit(
        stream,
        request.request_id,
        request.prompt_token_ids,
        msgspec.Raw(_PARAMS_ENCODER.encode(request.params)),
        request.seed,
        request.priority,
        request.cache_salt,
        request.resume if resume is None else resume,
        request.pooling,
        request.num_scored_tokens if scored is None else scored,
        None if request.deadline is None else max(0.0, request.deadline - now),
        request.tenant,
        tuple(waited(event, now) for event in story),
        trace,
        retried,
    )


def submitted_request(submit: Submit, engine_id: str, now: float = 0.0) -> Request:
    """Return the request under the id that the engine knows it by. Raises `InvalidRequestError` for bad params.

    now: seconds on the engine's clock. One whose grammar is compiled first arrives now all the same: its queue time
    and its turn are from now on.
    """
    try:
        params = _PARAMS_DECODER.decode(submit.params)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequestError(f"the sampling parameters cannot be read: {error}", "params") from error
    return Request(
        request_id=engine_id,
        prompt_token_ids=submit.prompt,
        params=params,
        seed=submit.seed,
        priority=submit.priority,
        arrival_time=None if params.structured is None else now,
        cache_salt=submit.cache_salt,
        resume=submit.resume,
        pooling=submit.pooling,
        num_scored_tokens=submit.scored,
        deadline=None if submit.timeout is None else now + submit.timeout,
        tenant=submit.tenant,
        retried=submit.retried,
    )


def prompt_row(stream: int, told: PromptLogprobs) -> PromptRow:
    """Return log-probabilities of a prompt as they travel."""
    entries = told.logprobs
    return PromptRow(
        stream,
        told.first,
        [entry.logprob for entry in entries],
        [[token_id for token_id, _ in entry.top] for entry in entries],
        [[value for _, value in entry.top] for entry in entries],
        [entry.rank for entry in entries],
    )


def prompt_logprobs(row: PromptRow, prompt: tuple[int, ...]) -> list[TokenLogprob]:
    """Return a replica's log-probabilities of the tokens of `prompt`; fewer if the prompt ends before."""
    tokens = prompt[row.first : row.first + len(row.logprobs)]
    return [
        TokenLogprob(token, value, tuple(zip(ids, values, strict=True)), rank)
        for token, value, ids, values, rank in zip(
            tokens, row.logprobs, row.top_ids, row.top_logprobs, row.ranks, strict=False
        )
    ]


def pooled_row(stream: int, state: Floats) -> PooledRow:
    """Return a pooled state, [hidden] fp32, as it travels."""
    return PooledRow(stream, state.astype("<f4").tobytes())


def pooled_state(row: PooledRow) -> tuple[float, ...]:
    """Return the pooled state that a replica sent."""
    return tuple(np.frombuffer(row.state, "<f4").tolist())


def load_of(stats: EngineStats, progress_age: float) -> Load:
    """Return an engine's figures as they travel."""
    return Load(
        stats.num_running,
        stats.num_waiting,
        stats.outstanding_tokens,
        stats.kv_blocks_total,
        stats.kv_blocks_free,
        stats.kv_blocks_cached,
        stats.prefix_query_tokens,
        stats.prefix_hit_tokens,
        stats.preemptions,
        stats.prompt_tokens,
        stats.generated_tokens,
        progress_age,
    )


def waited(event: WaitEvent, now: float) -> Waited:
    """Return an event as it travels. now: seconds on its clock."""
    return Waited(max(0.0, now - event.at), event.what, clipped(event.detail))


def usage_of(used: EngineUsage) -> ResourceUsage:
    """Return nanoseconds of usage as they travel."""
    return ResourceUsage(used.device_ns / NANOS, used.block_ns / NANOS)


def costs_of(
    costs: EngineCosts, grammars: Mapping[str, float] = NOTHING, histograms: Mapping[str, Counted] = UNCOUNTED
) -> ReplicaCosts:
    """Return an engine's accounts as they travel. grammars: seconds of compiling by tenant. histograms: by family."""
    tenants = {name: usage_of(used) for name, used in costs.tenants.items()}
    compiled: dict[str, float] = {}
    for tenant, seconds in grammars.items():
        name = tenant if tenant in tenants or len(compiled) < MAX_TENANTS else OTHERS
        compiled[name] = compiled.get(name, 0.0) + seconds
    return ReplicaCosts(usage_of(costs.total), usage_of(costs.idle), tenants, compiled, dict(histograms))


def stats_of(load: Load) -> EngineStats:
    """Return a replica's figures as its engine has them."""
    return EngineStats(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        kv_blocks_total=load.kv_blocks_total,
        kv_blocks_free=load.kv_blocks_free,
        kv_blocks_cached=load.kv_blocks_cached,
        prefix_query_tokens=load.prefix_query_tokens,
        prefix_hit_tokens=load.prefix_hit_tokens,
        preemptions=load.preemptions,
        prompt_tokens=load.prompt_tokens,
        generated_tokens=load.generated_tokens,
        outstanding_tokens=load.outstanding_tokens,
    )


def block_key(digest: bytes) -> int:
    """Return the short name of a KV block. It only steers routing, where a rare collision does no harm."""
    return int.from_bytes(digest[:HASH_KEY_BYTES], "little")


def clipped(text: str, length: int = MAX_TEXT) -> str:
    """Return `text`, cut to what a message may carry; what UTF-8 has no bytes for becomes a question mark."""
    return text[:length].encode(errors="replace").decode()
