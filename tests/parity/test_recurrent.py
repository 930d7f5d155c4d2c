"""Models with a recurrent state: transformers' tokens, and the bits of a run alone in whatever else happens."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.llm import LLM
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.worker.executor_start import build_executor
from engine.worker.footprint import footprint_of
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests import tiny_tokenizer
from tests.long import examples
from tests.parity.tiny_models import RECURRENT, make, oracle_logits, prompts

pytestmark = pytest.mark.usefixtures("one_thread")
CONTEXT = 128
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# What is asked of the engine while others come and go: prompts with a common beginning, of one choice and of two.
SHARED = tuple(range(5, 75))
ASKED = [
    ((*SHARED, 50, 51), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1)),
    (SHARED[:52], SamplingParams(temperature=1.1, seed=3, max_tokens=9, ignore_eos=True, logprobs=1)),
    ((*SHARED[:40], 7), SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=7, ignore_eos=True, logprobs=1)),
    (SHARED[:20], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)),
    ((*SHARED, 50, 51), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1)),
]


@pytest.fixture(scope="module", params=RECURRENT)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = make(request.param, folder)
    tiny_tokenizer.save(tiny_tokenizer.byte_level(), folder)
    return model, folder


def opened(folder, **changes):
    given = {"num_kv_blocks": 60, "max_num_seqs": 6, "max_num_batched_tokens": 40, "max_model_len": 80}
    return LLM(folder, device="cpu", **{"dtype": "float32", "block_size": 4, **given, **changes})


def check_tokens(model, ragged, results):
    for prompt, result in zip(ragged, results, strict=True):
        tokens = list(result.outputs[0].token_ids)
        logits = oracle_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        best, drawn = logits.max(dim=-1).values, logits[range(len(tokens)), tokens]
        assert (best - drawn).max() < 2e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 400},
        {"state_snapshot_blocks": 2, "num_kv_blocks": 30},
        {"attention_backend": "reference", "state_snapshot_blocks": 3, "num_state_snapshots": 40},
        {"tensor_parallel_size": 2, "state_snapshot_blocks": 2, "num_state_snapshots": 40},
    ],
    ids=["whole", "cramped", "reference", "two ranks"],
)
def test_greedy_tokens_are_those_of_transformers(checkpoint, changes):
    model, folder = checkpoint
    ragged = prompts(7, seed=4)
    with opened(folder, **changes) as llm:
        check_tokens(model, ragged, llm.generate(ragged, GREEDY))
        if "num_kv_blocks" in changes:
            assert llm.stats().preemptions > 0
        else:
            check_tokens(model, ragged, llm.generate(ragged, GREEDY))
            assert (llm.stats().prefix_hit_tokens > 0) == ("state_snapshot_blocks" in changes)


def test_tokens_in_bfloat16_do_not_depend_on_the_company(checkpoint):
    """Through the compiled kernels, whose elements are of 16 bits then."""
    _, folder = checkpoint
    ragged = prompts(6, seed=8)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)

    def said(result):
        (choice,) = result.outputs
        return choice.token_ids, [each.logprob for each in choice.logprobs]

    with opened(folder, dtype="bfloat16", block_size=16, batch_invariant=True, enable_prefix_caching=False) as llm:
        together = [said(result) for result in llm.generate(ragged, params)]
        assert [said(result) for prompt in ragged for result in llm.generate([prompt], params)] == together


@pytest.fixture(scope="module")
def engine(checkpoint):
    """An executor with room for all, and what each request gets alone: by its number, choice by choice."""
    config = EngineConfig(str(checkpoint[1]), device="cpu", dtype="float32", num_kv_blocks=100, max_num_seqs=8)
    config = config.resolved(batch_invariant=True)  # of which the reference of attention is not capable
    executor, info = build_executor(config.resolved(max_model_len=CONTEXT, num_state_snapshots=24))
    alone = []
    for number, (prompt, params) in enumerate(ASKED):
        core = core_of((executor, info), enable_prefix_caching=False)
        core.add(Request(str(number), prompt, params, seed=params.seed or 0))
        alone.append(run(core)[str(number)])
    yield executor, info, alone
    executor.close()


def core_of(engine, **changes):
    executor, info, *_ = engine
    config = info.config.resolved(**changes)
    return EngineCore(config, executor, info.eos_token_ids, info.vocab_size, config.num_kv_blocks)


def run(core, after=lambda step: None):
    """Step to the end; return tokens with the bits of their log-probabilities, by request and choice."""
    found = defaultdict(lambda: defaultdict(list))
    step = 0
    while core.has_unfinished:
        report = core.step()
        core.check_integrity()
        for row, (sequence, token) in enumerate(zip(report.sequences, report.token_ids, strict=True)):
            found[sequence.request.request_id][sequence.index].append((token, report.logprobs[row].logprob))
        step += 1
        after(step)
    return found


shapes = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.integers(6, 90),
        "long_prefill_token_threshold": st.sampled_from([0, 3, 7]),
        "max_num_seqs": st.integers(2, 8),
        "num_kv_blocks": st.integers(9, 24),
        "state_snapshot_blocks": st.integers(1, 3),
        "num_state_snapshots": st.sampled_from([0, 1, 3, 20]),
        "async_scheduling": st.booleans(),
    }
)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=shapes,
    order=st.permutations(range(len(ASKED))),
    arrivals=st.lists(st.integers(0, 12), min_size=len(ASKED), max_size=len(ASKED)),
    moves=st.dictionaries(
        st.integers(1, 30), st.sampled_from(["abort", "migrate", "preempt", "neighbour"]), max_size=4
    ),
)
def test_whatever_happens_around_a_request_its_bits_stay(engine, shape, order, arrivals, moves):
    """Hits, chunks, preemptions, migrations, choices, aborts, overlapped steps: all in one history."""
    core = core_of(engine, **shape)
    left = sorted(zip(arrivals, order, strict=True))
    logs: dict[str, dict[int, list]] = defaultdict(lambda: defaultdict(list))
    parts, aborted = {}, set()

    def request(number, part=0):
        prompt, params = ASKED[number]
        name = f"{number}.{part}"
        parts[number] = part
        log = logs[str(number)]
        resume = {choice: tuple(token for token, _ in entries) for choice, entries in log.items()} or None
        open_ = None
        if resume is not None:
            open_ = {c: t for c, t in resume.items() if len(t) < params.max_tokens}
            for choice in range(params.n):
                if choice not in resume:
                    open_[choice] = ()
            if not open_:
                return
        core.add(Request(name, prompt, params, seed=params.seed or 0, resume=open_))

    def arrive(step):
        while left and left[0][0] <= step:
            request(left.pop(0)[1])

    arrive(0)
    step = 0
    while left or core.has_unfinished:
        step += 1
        if core.has_unfinished:
            report = core.step()
            core.check_integrity()
            for row, (sequence, token) in enumerate(zip(report.sequences, report.token_ids, strict=True)):
                name = sequence.request.request_id
                if not name.startswith("x"):
                    logs[name.split(".")[0]][sequence.index].append((token, report.logprobs[row].logprob))
        arrive(step)
        move = moves.get(step)
        running = [n for n, part in parts.items() if f"{n}.{part}" in core._scheduler and n not in aborted]
        if move == "neighbour":
            core.add(Request(f"x{step}", (*SHARED[:36], 99), GREEDY))
        elif move == "preempt":
            if not core._scheduler.is_ahead:
                core._scheduler.preempt_all(core.clock())
        elif move and running:
            number = running[step % len(running)]
            core.abort(f"{number}.{parts[number]}")
            if move == "abort":
                aborted.add(number)
            else:
                request(number, parts[number] + 1)
    for number, expected in enumerate(engine[2]):
        for choice, entries in expected.items():
            got = logs[str(number)][choice]
            assert got == (entries[: len(got)] if number in aborted else entries)


@pytest.mark.parametrize("size", [1, 2])
def test_the_plan_counts_what_is_allocated(checkpoint, two_ranks, size):
    config = EngineConfig(
        str(checkpoint[1]),
        device="cpu",
        dtype="float32",
        kv_cache_memory_bytes=1 << 20,
        max_num_seqs=4,
        tensor_parallel_size=size,
    )

    def held(group):
        runner = ModelRunner(config, group)
        cache = runner._cache
        return (
            runner.config,
            runner.model_config,
            *(
                sum(tensor.untyped_storage().nbytes() for tensor in tensors)
                for tensors in (cache.tensors, cache.states)
            ),
        )

    resolved, model, blocks, states = (two_ranks(held) if size == 2 else [held(SoloGroup())])[0]
    found = footprint_of(resolved, model)
    assert blocks == resolved.num_kv_blocks * found.block_bytes
    assert states == (4 + resolved.num_state_snapshots + 1) * found.state_bytes > 0
    assert blocks + states <= 1 << 20


def test_states_that_do_not_fit_are_refused_with_what_helps(checkpoint):
    with pytest.raises(ConfigError, match=r"max_num_seqs=60000 .* lower max_num_seqs to [0-9]+") as refused:
        opened(checkpoint[1], num_kv_blocks=None, kv_cache_memory_bytes=1 << 20, max_num_seqs=60000)
    assert refused.value.flag == "max_num_seqs"


def test_only_models_with_states_take_snapshots(tmp_path):
    make("llama", tmp_path)
    tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path)
    with pytest.raises(ConfigError, match="num_state_snapshots is for models that keep a recurrent state"):
        opened(tmp_path, num_state_snapshots=4)


def test_an_engine_that_slept_starts_from_nothing(checkpoint):
    ragged = prompts(3, seed=9)
    with opened(checkpoint[1], enable_sleep_mode=True, state_snapshot_blocks=1) as llm:
        before = [result.outputs[0].token_ids for result in llm.generate(ragged, GREEDY)]
        llm.sleep(level=1)
        llm.wake_up()
        assert [result.outputs[0].token_ids for result in llm.generate(ragged, GREEDY)] == before


@pytest.mark.parametrize("kind", ["lfm2", "nemotron_h", "qwen3_next"])
def test_kernels_for_gpus_give_the_tokens_of_transformers(kind, tmp_path, monkeypatch):
    """Through Triton's interpreter: prompts in chunks, a prefix that is found again, two choices."""
    triton_kernels = pytest.importorskip("engine.kernels.triton_kernels")
    monkeypatch.setattr("engine.worker.runner.select_kernels", lambda *_: triton_kernels.TritonKernels())
    model = make(kind, tmp_path)
    tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path)
    ragged = [list(range(5, 19)), [*range(5, 13), 60, 61]]
    asked = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, n=2)
    with opened(tmp_path, max_num_batched_tokens=9, state_snapshot_blocks=1, num_state_snapshots=8) as llm:
        for _ in range(2):
            check_tokens(model, ragged, llm.generate(ragged, asked))
        assert llm.stats().prefix_hit_tokens > 0
