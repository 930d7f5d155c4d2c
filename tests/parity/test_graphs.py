"""Decode steps from graphs give the tokens and logits of eager ones, on real (tiny) models."""

from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.worker.graph_sizes import NO_SIZES, GraphSizes
from engine.worker.local_executor import SoloExecutor
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests.engine.worker.graph_lab import RerunDevice
from tests.parity.graph_lab import use_graphs
from tests.parity.stepping import Sequence, Stepper
from tests.parity.tiny_models import CONFIGS, VOCAB, WITH_EXPERTS, check_against, make, prompts

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = GraphSizes((1, 2, 4, 8), (2, 8))
MIXED = GraphSizes((4, 16, 48), (4, 16, 48))
ABORTED = ("r0", "r4")


def runner_config(folder, **values):
    settings = {"num_kv_blocks": 120, "block_size": 4, "device": "cpu", "dtype": "float32", "max_model_len": 96}
    settings |= {"max_num_seqs": 8, "max_num_batched_tokens": 64, "attention_backend": "reference", **values}
    return EngineConfig(str(folder), **settings)


def runner_of(folder, **values):
    return ModelRunner(runner_config(folder, **values), SoloGroup())


# Experts ask on the host how many rows each gets.
GRAPHED = [name for name in CONFIGS if name not in WITH_EXPERTS]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_steps_that_ask_the_host_are_not_recorded(tmp_path, name):
    make(name, tmp_path)
    assert not runner_of(tmp_path).model.supports_graphs


@torch.inference_mode()
def capture(runner):
    runner._capture(runner._forward.pools)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return make("llama", folder), folder


@pytest.mark.parametrize("name", GRAPHED)
def test_every_architecture_says_the_same_from_graphs(tmp_path, name):
    model = make(name, tmp_path)
    runner = runner_of(tmp_path)
    device = use_graphs(runner, SIZES)
    capture(runner)
    assert runner._forward.graphs.pool.captured == (2, 8)
    stepper = stepper_of(runner)
    ragged = prompts(5, seed=4)
    sequences = stepper.generate(ragged, 6)
    assert device.replays == 5
    check_against(model, sequences, ragged)


@pytest.mark.parametrize("name", GRAPHED)
def test_every_architecture_says_the_same_from_graphs_of_mixed_steps(tmp_path, name):
    """Chunks of prompts beside decodes, whole prompts, and steps of more tokens than there are graphs for."""
    model = make(name, tmp_path)
    runner = runner_of(tmp_path)
    device = use_graphs(runner, SIZES, mixed=MIXED)
    capture(runner)
    assert [pool.captured for pool in runner._forward.pools] == [(2, 8), (4, 16, 48)]
    ragged = prompts(6, seed=4)
    sequences = [Sequence(list(prompt)) for prompt in ragged]
    steps = in_chunks(stepper_of(runner), sequences, 4)
    check_against(model, sequences, ragged)
    assert device.replays > 0.8 * steps > 5


def in_chunks(stepper, sequences, count):
    """Draw `count` tokens of each, four sequences at a time, prompts in chunks beside them; return the steps."""
    steps = 0
    while short := [i for i, s in enumerate(sequences) if len(s.logits) < count]:
        left = {i: len(sequences[i].tokens) - sequences[i].computed for i in short[:4]}
        stepper.step({i: min(7 + 2 * i, new) for i, new in left.items()}, sequences)
        steps += 1
    return steps


def stepper_of(runner):
    """Return a stepper that sees the logits of graphs, too, which do not go through the head that it watches."""
    stepper, run = Stepper(runner), runner._forward.run

    def watched(inputs):
        passed = run(inputs)
        stepper._logits = passed.head.logits(passed.rows).clone()
        return passed

    runner._forward.run = watched
    return stepper


def test_a_start_says_what_it_captured(llama, caplog):
    runner = runner_of(llama[1])
    device = use_graphs(runner, SIZES)
    device.bytes_taken = 3 << 20
    with caplog.at_level("INFO"):
        capture(runner)
    told = "CUDA graphs: 2 batch sizes up to 8 captured, 3 MiB; of 4, the rest when needed"
    assert told in [record.getMessage() for record in caplog.records]


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, Triton has no interpreter")
def test_tritons_kernels_take_padding_for_nothing(llama):
    """Through the interpreter, which cannot be recorded: the work of a graph is run again on the same memory."""
    model, folder = llama
    runner = runner_of(folder, block_size=16)
    triton = import_module("engine.attention.triton").TritonAttention(runner._attention.spec)
    device = use_graphs(runner, SIZES, RerunDevice(), triton, mixed=MIXED)
    sequences = stepper_of(runner).generate(prompts(3, seed=4), 3)
    assert device.replays == 2
    check_against(model, sequences, prompts(3, seed=4))
    mixed = [Sequence(list(prompt)) for prompt in prompts(5, seed=5)]
    steps = in_chunks(stepper_of(runner), mixed, 2)
    check_against(model, mixed, prompts(5, seed=5))
    assert device.replays > 2 + 0.8 * steps > 5


def engine_of(folder, graphs, mixed=NO_SIZES, **settings):
    runner = runner_of(folder)
    device = use_graphs(runner, SIZES, mixed=mixed) if graphs else None
    if device is not None:
        for pool in runner._forward.pools:
            pool._patience = 2
        capture(runner)
    config = runner.config.resolved(num_kv_blocks=40, **settings)
    core = EngineCore(config, SoloExecutor(runner), runner.model_config.eos_token_ids, VOCAB, 40)
    return core, runner, device


def histories(core, seed):
    """Requests come at random times, some are aborted, and blocks are so few that some are preempted."""
    random = np.random.default_rng(seed)
    tokens: dict[str, list[int]] = {}
    due = sorted(random.integers(0, 10, 7).tolist())
    aborts = {name: int(random.integers(5, 40)) for name in ABORTED}
    step = 0
    while due or core.has_unfinished:
        while due and due[0] <= step:
            number = 7 - len(due)
            due.pop(0)
            prompt = tuple(random.integers(3, VOCAB, random.integers(1, 30)).tolist())
            params = SamplingParams(
                temperature=0.8 * (number % 2),
                max_tokens=int(random.integers(2, 16)),
                ignore_eos=True,
                n=1 + number % 3,
            )
            core.add(Request(f"r{number}", prompt, params, seed=number))
        for request_id in [each for each, when in aborts.items() if when == step]:
            core.abort(request_id)
        report = core.step()
        core.check_integrity()
        for sequence, token in zip(report.sequences, report.token_ids, strict=True):
            tokens.setdefault(f"{sequence.request.request_id}/{sequence.index}", []).append(token)
        step += 1
    return tokens


@pytest.mark.parametrize("mixed", [NO_SIZES, MIXED], ids=["decodes", "mixed steps too"])
@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_says_the_same_with_graphs_and_without(llama, ahead, mixed):
    _, folder = llama
    eager, _, _ = engine_of(folder, graphs=False, async_scheduling=False)
    core, runner, device = engine_of(folder, graphs=True, mixed=mixed, async_scheduling=ahead)
    for seed in range(2):
        told, expected = histories(core, seed), histories(eager, seed)
        assert told.keys() == expected.keys()
        for name, tokens in told.items():
            # A step that is ahead brings its tokens later: an abort may cut off one more, or one less.
            length = min(len(tokens), len(expected[name])) if name.split("/")[0] in ABORTED else None
            assert tokens[:length] == expected[name][:length]
        # As when weights or cache move: what is needed is captured anew.
        runner._forward.drop_graphs()
    assert device.replays > 20
    assert ahead or eager.stats() == core.stats()
    assert (core.stats().steps_ahead > 20) == ahead


@pytest.mark.parametrize("mixed", [NO_SIZES, MIXED], ids=["decodes", "mixed steps too"])
@pytest.mark.parametrize("beside", [{}, {"pooling": "last"}], ids=["a chunk of one token", "an embedding"])
def test_siblings_draw_from_their_own_prompt_beside_one_that_draws_nothing(llama, beside, mixed):
    """As many logits as tokens and sequences, but not one of each."""
    told, pooled = [], []
    for graphs in (True, False):
        core, _, _ = engine_of(llama[1], graphs, mixed, max_num_batched_tokens=2)
        core.add(Request("family", (9,), SamplingParams(n=2, max_tokens=4, ignore_eos=True), seed=1))
        prompt = (7,) if beside else (5, 6, 7)
        core.add(Request("beside", prompt, SamplingParams(max_tokens=2, ignore_eos=True), **beside))
        told.append({})
        while core.has_unfinished:
            report = core.step()
            for sequence, token in zip(report.sequences, report.token_ids, strict=True):
                told[-1].setdefault((sequence.request.request_id, sequence.index), []).append(token)
            pooled += [state for _, state in report.pooled]
    assert told[0] == told[1]
    assert len(pooled) == 2 * bool(beside)
    np.testing.assert_allclose(*pooled or ([], []), rtol=1e-4)


def test_two_ranks_say_from_graphs_what_they_say_without(two_ranks, llama):
    """In one padded size on both; greedy rows are gathered or drawn apart, as the executor asks."""
    _, folder = llama
    ranks = two_ranks(lambda group: ModelRunner(runner_config(folder), group))
    # Sums between CPU ranks are no operations of torch that could be recorded, as NCCL's are.
    devices = two_ranks(lambda group: use_graphs(ranks[group.rank], SIZES, RerunDevice()))
    ragged = prompts(5, seed=4)
    for apart in (False, True):

        def execute(inputs, draws, apart=apart):
            if apart:
                inputs.draws = np.zeros((len(inputs.logits_indices), 5), np.int32)
            return two_ranks(lambda group: ranks[group.rank].execute(inputs, None if group.rank else draws))[0]

        gang = Stepper(SimpleNamespace(model=ranks[0].model, config=ranks[0].config, execute=execute))
        gang._logits = torch.zeros(8, VOCAB)
        told = gang.generate(ragged, 6)
        assert [s.tokens for s in told] == [s.tokens for s in Stepper(runner_of(folder)).generate(ragged, 6)]
    assert [device.replays for device in devices] == [10, 10]


def test_a_replay_reads_what_was_filled_in_since(llama):
    _, folder = llama
    runner = runner_of(folder)
    device = use_graphs(runner, SIZES)
    stepper = stepper_of(runner)
    first = [Sequence(list(prompt)) for prompt in prompts(3, seed=1)]
    second = [Sequence(list(prompt)) for prompt in prompts(2, seed=2)]
    stepper.step({i: len(s.tokens) for i, s in enumerate(first)}, first)
    stepper.step({i: len(s.tokens) for i, s in enumerate(second)}, second)
    for _ in range(4):  # in turn, in one size: nothing of the one may be left for the other
        stepper.step(dict.fromkeys(range(3), 1), first)
        stepper.step(dict.fromkeys(range(2), 1), second)
    assert device.replays == 8
    alone = Stepper(runner_of(folder))
    assert [s.tokens for s in alone.generate(prompts(3, seed=1), 5)] == [s.tokens for s in first]
    assert [s.tokens for s in alone.generate(prompts(2, seed=2), 5)] == [s.tokens for s in second]
