"""Whole batches of engine requests made at random from a seed, with all parameters at once, and cramped engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from random import Random
from typing import Any

from engine.errors import InvalidRequestError
from engine.request import Request
from engine.sampling_params import SamplingParams, StructuredOutput
from tests.parity.tiny_models import CONFIGS, RECURRENT, VOCAB

FAMILIES = (*CONFIGS, *RECURRENT)
CONTEXT = 128  # tokens of a sequence
GRAMMARS = [
    StructuredOutput("regex", "[a-f]{3,9}(x|yz)*"),
    StructuredOutput("regex", "\\d+-\\d{2}"),
    StructuredOutput("choice", '["yes", "no", "perhaps"]'),
    StructuredOutput("json_object"),
    StructuredOutput("json_schema", '{"type": "array", "items": {"enum": [1, 22, "a"]}, "maxItems": 4}'),
    StructuredOutput("grammar", 'root ::= "(" root ")" | [a-z] | ""'),
]


@dataclass(frozen=True)
class Wish:
    """A request and what happens to it, by steps of the engine.

    joins: the step before which it is added. leaves: the one before which it is aborted. resumes: tokens of each
    choice that another engine drew before. complete: choice -> tokens after which its text is complete.
    """

    request: Request
    joins: int = 0
    leaves: int | None = None
    resumes: int | None = None
    complete: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """Requests for one engine. model: what decides the bits, of the roomy engine too. cramped: of the tight one.

    Of the tight one alone are naps, the steps before which it sleeps and wakes up; pieces, the rows of logits that it
    has at a time; and parts, the tokens that it takes through the layers at a time. None: as many as it likes.
    """

    family: str
    wishes: tuple[Wish, ...]
    model: dict[str, Any] = field(default_factory=dict)
    cramped: dict[str, Any] = field(default_factory=dict)
    naps: tuple[int, ...] = ()
    pieces: int | None = None
    parts: int | None = None

    def shorter(self) -> Iterator[Batch]:
        """Yield batches that say less: many requests fewer, then one, then plainer ones and a roomier engine."""
        size = len(self.wishes) // 2
        while size:
            for first in range(0, len(self.wishes), size):
                yield replace(self, wishes=self.wishes[:first] + self.wishes[first + size :])
            size //= 2
        for name, usual in _unusual(self):
            if name not in ("model", "cramped"):
                yield replace(self, **{name: usual})
        for name in ("model", "cramped"):
            given = getattr(self, name)
            for key in given:
                yield replace(self, **{name: {other: given[other] for other in given if other != key}})
        for number, wish in enumerate(self.wishes):
            for plainer in _plainer(wish):
                yield replace(self, wishes=(*self.wishes[:number], plainer, *self.wishes[number + 1 :]))


def _plainer(wish: Wish) -> Iterator[Wish]:
    for name, usual in _unusual(wish):
        yield replace(wish, **{name: usual})
    for name, usual in _unusual(wish.request):
        yield replace(wish, request=replace(wish.request, **{name: usual}))
    params = wish.request.params
    for name, usual in _unusual(params):
        try:
            yield replace(wish, request=replace(wish.request, params=replace(params, **{name: usual})))
        except InvalidRequestError:
            continue  # other parameters want this one
    if (ids := wish.request.prompt_token_ids)[1:]:
        yield replace(wish, request=replace(wish.request, prompt_token_ids=ids[: len(ids) // 2]))


def _unusual(one: Any) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass that are not as usual, each with what is usual."""
    found = []
    for each in fields(one):
        usual = each.default_factory() if each.default_factory is not MISSING else each.default
        if usual is not MISSING and getattr(one, each.name) != usual:
            found.append((each.name, usual))
    return found


def source(value: Any) -> str:
    """Return the Python of a value, without the fields of dataclasses that are as usual."""
    if is_dataclass(value):
        wanted = {each.name for each in fields(value) if each.default is each.default_factory is MISSING}
        wanted |= {name for name, _ in _unusual(value)}
        given = [f"{each.name}={source(getattr(value, each.name))}" for each in fields(value) if each.name in wanted]
        return f"{type(value).__name__}({', '.join(given)})"
    if isinstance(value, tuple):
        return f"({''.join(f'{source(one)}, ' for one in value)})"
    return repr(value)


def wild_batch(seed: str, ranks: int | None = None) -> Batch:
    """Return the batch of this seed; of one or two ranks where that is left open."""
    rng = Random(seed)
    size = rng.choices([1, 2], [6, 1])[0] if ranks is None else ranks
    family = rng.choice(FAMILIES)
    pool = [tuple(rng.randrange(3, VOCAB) for _ in range(CONTEXT)) for _ in range(3)]
    # Few kinds of parameters in some batches, for there are ways that few of them leave open.
    share = rng.choice([0.15, 0.5, 1.0])
    kinds = {name for name in _all_params(rng) if rng.random() < share}
    count = rng.choice([2, 4, 8, 8, 16, 32])
    wishes = tuple(_wish(rng, f"r{number}", pool, kinds) for number in range(count))
    most = max(wish.request.params.n for wish in wishes)
    naps = tuple(rng.randrange(1, 40) for _ in range(rng.choice([0, 0, 0, 0, 1, 2])))
    batch = Batch(family, wishes, _model(rng, size), _cramped(rng, family, most), naps)
    if size > 1:
        return batch  # what is set in this process is not in the others
    return replace(batch, pieces=rng.choice([None, 1, 2, 7]), parts=rng.choice([None, None, 5, 16]))


def _model(rng: Random, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {"tensor_parallel_size": ranks} if ranks > 1 else {}
    if rng.random() < 0.15:
        found["dtype"] = "bfloat16"
    if rng.random() < 0.15:
        found["quantization"] = rng.choice(["int8", "int4"])
    if ranks > 1 and rng.random() < 0.5:
        found["enable_expert_parallel"] = True
    return found


def _cramped(rng: Random, family: str, least: int) -> dict[str, Any]:
    """Return the settings of an engine in which little fits, `least` sequences of one request at any rate."""
    size = rng.choice([16, 16, 32])  # those of which attention gives the same bits in any company
    snapshots = {"num_state_snapshots": rng.choice([0, 3, 30])} if family in RECURRENT else {}
    return snapshots | {
        "block_size": size,
        # The null block, one sequence, and how many blocks others find beside it.
        "num_kv_blocks": 1 + CONTEXT // size + rng.choice([0, 1, 3, 10, 100]),
        "max_num_seqs": max(least, rng.choice([1, 3, 8, 20, 48])),
        "max_num_batched_tokens": rng.choice([1, 3, 8, 8, 17, 17, 40, 40, 200]),
        "long_prefill_token_threshold": rng.choice([0, 0, 1, 5, 16]),
        "enable_prefix_caching": rng.random() < 0.8,
        "async_scheduling": rng.random() < 0.6,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "state_snapshot_blocks": rng.choice([1, 1, 2, 3]),
    }


def _wish(rng: Random, name: str, pool: list[tuple[int, ...]], kinds: set[str]) -> Wish:
    pooling = rng.choice(["last", "mean"]) if rng.random() < 0.08 else None
    params = SamplingParams(max_tokens=1) if pooling else _params(rng, kinds)
    longest = CONTEXT - max(params.min_tokens, params.max_tokens or 1)
    request = Request(
        name,
        _prompt(rng, pool, longest),
        params,
        seed=rng.choice([0, 1, rng.randrange(-(2**63), 2**63)]),
        priority=rng.randrange(-2, 3),
        cache_salt=rng.choice([b"", b"", b"another"]),
        pooling=pooling,
    )
    if params.prompt_logprobs is not None and rng.random() < 0.2:
        request = replace(request, num_scored_tokens=rng.randrange(len(request.prompt_token_ids) + 1))
    return Wish(
        request,
        rng.choice([0, 0, 0, rng.randrange(40)]),
        rng.randrange(1, 60) if rng.random() < 0.1 else None,
        rng.randrange(8) if pooling is None and rng.random() < 0.15 else None,
        {rng.randrange(params.n): rng.randrange(1, 8)} if pooling is None and rng.random() < 0.1 else {},
    )


def _prompt(rng: Random, pool: list[tuple[int, ...]], longest: int) -> tuple[int, ...]:
    length = min(rng.choice([1, 2, 2, 3, 3, 4, 5, 6, 9, 15, 16, 17, 32, 33, 60, 90]), longest)
    shared = rng.choice([0, length - 1, length, rng.randrange(length + 1)])
    return rng.choice(pool)[:shared] + tuple(rng.randrange(3, VOCAB) for _ in range(length - shared))


def _params(rng: Random, kinds: set[str]) -> SamplingParams:
    """Return parameters of these kinds, each given or left out by itself; those at odds are drawn anew."""
    share = rng.choice([0.0, 0.1, 0.3, 0.6])
    while True:
        drawn = {name: value for name, value in _all_params(rng).items() if name in kinds and rng.random() < share}
        if rng.random() < 0.4:
            drawn["temperature"] = 0.0
        drawn.setdefault("max_tokens", rng.randrange(1, 16))
        try:
            return SamplingParams(**drawn)
        except InvalidRequestError:
            continue


def _all_params(rng: Random) -> dict[str, Any]:
    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, most)))

    return {
        "n": rng.choice([2, 2, 3, 3, 5, 16]),
        "temperature": rng.choice([0.01, 0.5, 1.0, 1.5, 5.0, 100.0]),
        "top_p": rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999]),
        "top_k": rng.choice([1, 2, 5, 50, VOCAB, 2**31 - 1]),
        "min_p": rng.choice([0.001, 0.1, 0.9, 1.0]),
        "repetition_penalty": rng.choice([0.01, 0.8, 1.1, 2.0, 100.0]),
        "presence_penalty": rng.choice([-2.0, -0.5, 0.7, 2.0]),
        "frequency_penalty": rng.choice([-2.0, -0.1, 0.3, 2.0]),
        "stop_token_ids": ids(30),
        "min_tokens": rng.randrange(1, 12),
        "max_tokens": rng.choice([None, 1, 2, 50]),
        "ignore_eos": True,
        "logprobs": rng.choice([-1, 0, 1, 3, 20]),
        "logprob_token_ids": ids(6),
        "prompt_logprobs": rng.choice([0, 0, 1, 5, 20]),
        "logit_bias": {token: rng.choice([-100.0, -3.0, 1.5, 100.0]) for token in ids(6)},
        "allowed_token_ids": ids(120),
        "bad_words_ids": tuple(ids(4) for _ in range(rng.randrange(1, 9))),
        "structured": rng.choice(GRAMMARS),
    }
