"""Whatever numbers a request comes with, they are its own affair: bystanders keep tokens, prefixes and pace."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import InvalidRequestError
from engine.report import Finish
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from engine.worker.executor_start import build_executor
from tests.long import examples
from tests.parity.tiny_models import VOCAB

pytestmark = pytest.mark.usefixtures("one_thread")

# A warm prefix that is nobody's now, and bystanders of every kind.
PREFIX = tuple(range(5, 45))
BYSTANDERS = {
    "greedy": SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.3, seed=3, max_tokens=9, ignore_eos=True),
    "filtered": SamplingParams(
        temperature=0.9, seed=4, top_k=20, top_p=0.8, min_p=0.01, max_tokens=9, ignore_eos=True
    ),
    "penalised": SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.2, max_tokens=9, ignore_eos=True),
    "told": SamplingParams(temperature=0, logprobs=2, prompt_logprobs=2, max_tokens=9, ignore_eos=True),
}

WILD = st.one_of(
    st.floats(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0.0, -0.0, 5e-324, 1e-45, 1e-39, 1e-30, 1e38, 1e39, 2**31 - 1, 2**31, 2**63 - 1, 2**63]),
)


def within(least: float, most: float) -> st.SearchStrategy[float]:
    """Numbers that are taken, above all those at the bounds, and those too small for fp32."""
    edges = [least, most, math.nextafter(least, most), math.nextafter(most, least)]
    tiny = [number for number in (5e-324, 1e-50, 1e-45, 1e-39, 1e-30, 1e-5) if least <= number]
    return st.one_of(st.sampled_from(edges + tiny), st.floats(least, most))


ids = st.integers(0, VOCAB - 1)
NUMBERS = {
    "temperature": within(0, 100),
    "n": st.integers(1, 16),
    "top_p": within(5e-324, 1),
    "top_k": st.one_of(st.integers(-1, VOCAB + 1), st.just(2**31 - 1)),
    "min_p": within(0, 1),
    "repetition_penalty": within(0.01, 100),
    "presence_penalty": within(-2, 2),
    "frequency_penalty": within(-2, 2),
    "seed": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    "min_tokens": st.integers(0, 5),
    "max_tokens": st.one_of(st.none(), st.integers(5, 20)),
    "logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
}
SETS = {
    "logit_bias": st.dictionaries(ids, within(-100, 100), max_size=4),
    "allowed_token_ids": st.lists(ids, max_size=4),
    "stop_token_ids": st.lists(ids, max_size=4),
    "bad_words_ids": st.lists(st.lists(ids, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
}


@st.composite
def extremes(draw: st.DrawFn) -> dict[str, Any]:
    """Parameters that are taken, but for one now and then that may be anything."""
    values = draw(st.fixed_dictionaries({}, optional=NUMBERS | SETS))
    if draw(st.integers(0, 3)) == 0:
        values[draw(st.sampled_from(sorted(NUMBERS)))] = draw(WILD)
    return values


class Engine:
    """An engine on a tiny model whose caches are filled, and what the bystanders got alone."""

    def __init__(self, folder: str, overlaps: bool) -> None:
        sizes = {
            "num_kv_blocks": 400,
            "block_size": 4,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 512,
            "scheduling_policy": "priority",
        }
        config = EngineConfig(folder, device="cpu", async_scheduling=overlaps, max_model_len=128, **sizes)
        executor, info = build_executor(config)
        self.core = EngineCore(info.config, executor, info.eos_token_ids, info.vocab_size, info.num_kv_blocks)
        self.run({"warm": Request("warm", PREFIX, SamplingParams(temperature=0, max_tokens=1))})
        self.alone()  # fills the cache with what they say
        self.undisturbed = self.alone()

    def alone(self) -> Any:
        return self.run({name: Request(name, (*PREFIX, 7), one, seed=9) for name, one in BYSTANDERS.items()})

    def beside(self, stranger: Request) -> tuple[Any, Finish]:
        requests = {name: Request(name, (*PREFIX, 7), one, seed=9) for name, one in BYSTANDERS.items()}
        return self.run({"stranger": stranger, **requests}), self.ends["stranger"]

    def run(self, requests: dict[str, Request]) -> Any:
        """Run to the end; return each bystander's tokens, figures, cached tokens, and the steps until all ended."""
        found: dict[str, list[Any]] = defaultdict(list)
        self.ends: dict[str, Finish] = {}
        for one in requests.values():
            self.core.add(one)
        steps, left = 0, set(requests) - {"stranger"}
        while self.core.has_unfinished:
            report = self.core.step()
            self.core.check_integrity()
            assert not report.events.cleared, "cached prefixes were forgotten"
            steps += bool(left)
            for row, (sequence, token) in enumerate(zip(report.sequences, report.token_ids, strict=True)):
                found[sequence.request.request_id].append((token, report.logprobs.get(row)))
            for told in report.prompt_logprobs:
                found[told.sequence.request.request_id].append(told.logprobs)
            for finish in report.finished:
                name = finish.sequence.request.request_id
                self.ends[name] = finish
                left.discard(name)
                found[name].append(finish.sequence.num_cached_tokens)
        return {name: found[name] for name in requests if name != "stranger"}, steps


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlapped"])
def engine(models, request):
    engine = Engine(str(models("llama")[1]), request.param)
    yield engine
    engine.core.close()


@settings(max_examples=examples(50), deadline=None, suppress_health_check=list(HealthCheck))
@given(values=extremes(), priority=st.integers(-(2**70), 2**70))
@example(values={"temperature": 0.0, "repetition_penalty": 1e-39}, priority=0)
@example(values={"temperature": 1.0, "repetition_penalty": 1e-39}, priority=0)
@example(values={"temperature": 0.0, "repetition_penalty": 0.01, "frequency_penalty": -2.0}, priority=-(2**70))
@example(values={"temperature": 1e-5, "top_p": 5e-324, "min_p": 1.0}, priority=0)
@example(values={"temperature": 0.0, "min_tokens": 4, "stop_token_ids": list(range(VOCAB))}, priority=0)
@example(values={"temperature": 1.0, "bad_words_ids": tuple((token,) for token in range(VOCAB))}, priority=0)
@example(values={"temperature": 1.0, "prompt_logprobs": 20, "logprobs": 20, "n": 16}, priority=0)
@example(values={"temperature": 0.0, "presence_penalty": 1e-50}, priority=0)
@example(values={"temperature": 0.0, "repetition_penalty": 1 + 1e-12, "frequency_penalty": 5e-324}, priority=0)
@example(values={"temperature": 1.0, "min_tokens": 2**31 - 1, "max_tokens": None}, priority=0)
def test_no_number_that_a_request_comes_with_is_felt_by_others(engine, values, priority):
    if "bad_words_ids" in values:
        values = {**values, "bad_words": ("x",) * bool(values["bad_words_ids"])}
    try:
        stranger = Request("stranger", (*PREFIX, 8), SamplingParams(**values), priority=priority)
        found, end = engine.beside(stranger)
    except InvalidRequestError as error:
        assert error.param is not None
        return
    assert found == engine.undisturbed
    assert end.reason is not FinishReason.ERROR or end.code, f"no fault of the request: {end.message}"
