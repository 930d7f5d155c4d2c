import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError, EngineDeadError
from engine.loader.checkpoint import open_model
from engine.resolve import resolve
from engine.threads import ThreadShare
from engine.worker.executor_start import build_executor, drive_worker_group, prepare_model
from engine.worker.local_executor import WorkerGroupExecutor
from engine.worker.runner import ModelRunner
from engine.worker.worker import worker_main
from parallel.group import SoloGroup
from parallel.rendezvous import Rendezvous
from parallel.torch_group import connect
from tests.parity import failing_rank
from tests.parity.stepping import Sequence, Stepper, sampling
from tests.parity.tiny_models import CONFIGS, check_against, prompts


def config(folder, **values):
    return EngineConfig(str(folder), **{"num_kv_blocks": 200, "block_size": 4, "device": "cpu", **values})


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_give_what_one_gives(two_ranks, models, name):
    model, folder = models(name)
    ranks = two_ranks(lambda group: ModelRunner(config(folder), group))

    def execute(inputs, draws):
        # Rank 0 samples; the other one gets the inputs alone.
        return two_ranks(lambda group: ranks[group.rank].execute(inputs, None if group.rank else draws))[0]

    gang = Stepper(SimpleNamespace(model=ranks[0].model, config=ranks[0].config, execute=execute))
    ragged = prompts(5, seed=4)
    sequences = gang.generate(ragged, 6)
    check_against(model, sequences, ragged)
    alone = Stepper(ModelRunner(config(folder), SoloGroup())).generate(ragged, 6)
    assert [s.tokens for s in sequences] == [s.tokens for s in alone]


def test_seeded_draws_do_not_depend_on_company_or_chunking(models):
    _, folder = models("qwen3")
    ragged = prompts(6, seed=5)
    stepper = Stepper(ModelRunner(config(folder), SoloGroup()))

    def generate(chosen, chunk):
        sequences = [Sequence(list(ragged[i])) for i in chosen]
        for _ in range(200):
            left = {
                row: min(chunk, len(s.tokens) - s.computed)
                for row, s in enumerate(sequences)
                if len(s.tokens) < len(ragged[chosen[row]]) + 6
            }
            if not left:
                break
            complete = [row for row, n in left.items() if sequences[row].computed + n == len(sequences[row].tokens)]
            seeds = [chosen[row] for row in complete]
            stepper.step(left, sequences, temperature=0.8, top_p=0.9, seeds=seeds or 0)
        stepper.release(sequences)
        return [s.tokens for s in sequences]

    together = generate(range(6), 64)
    assert [generate([i], 64)[0] for i in range(6)] == together
    assert generate(range(6), 5) == together


def test_a_poisoned_sequence_spoils_neither_company_nor_heirs(models):
    model, folder = models("llama")
    stepper = Stepper(ModelRunner(config(folder, num_kv_blocks=12, max_model_len=44), SoloGroup()))
    weight = stepper.runner.model.embedding.weight
    sound = weight[50].clone()
    weight[50] = float("nan")
    sequences = [Sequence([50, 5, 6, 7, 8, 9]), Sequence([3, 4, 5])]
    outputs = stepper.step({0: 6, 1: 3}, sequences)
    weight[50] = sound
    assert outputs.failed == (0,)
    check_against(model, sequences[1:], [[3, 4, 5]])
    # The next owner of the poisoned blocks fills them only in part: what is left of the NaNs must not reach it.
    stepper.free = list(reversed(sequences[0].blocks))
    heirs = stepper.generate([[9, 8]], 4)
    assert heirs[0].blocks[0] == sequences[0].blocks[0]
    check_against(model, heirs, [[9, 8]])


def test_a_step_without_samples_returns_no_tokens(models):
    _, folder = models("llama")
    stepper = Stepper(ModelRunner(config(folder), SoloGroup()))
    sequence = Sequence([3, 4, 5, 6])
    outputs = stepper.runner.execute(stepper.inputs([sequence], [2]), sampling(0))
    assert len(outputs.token_ids) == 0


def test_inputs_may_be_read_only(models):
    _, folder = models("llama")
    stepper = Stepper(ModelRunner(config(folder), SoloGroup()))
    inputs = stepper.inputs([Sequence([3, 4, 5])], [3])
    for array in (getattr(inputs, name) for name in inputs.__slots__):
        if array is not None:
            array.flags.writeable = False
    assert len(stepper.runner.execute(inputs, sampling(1)).token_ids) == 1


def test_bfloat16_stays_near_the_oracle(models):
    model, folder = models("qwen3")
    stepper = Stepper(ModelRunner(config(folder, dtype="bfloat16"), SoloGroup()))
    prompt = prompts(1, seed=8)[0]
    sequence = stepper.generate([prompt], 1)[0]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    assert torch.corrcoef(torch.stack([sequence.logits[0], expected]))[0, 1] > 0.99


def config_of(folder):
    return open_model(str(folder)).config


def test_auto_dtype_follows_the_checkpoint_and_the_units(models, monkeypatch):
    import dataclasses

    model = config_of(models("llama")[1])
    half = dataclasses.replace(model, dtype="bfloat16")
    for units, expected in (({"avx512_bf16": True}, "bfloat16"), ({"avx512_f": True}, "float32")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda units=units: units, raising=False)
        assert resolve(EngineConfig("m", device="cpu"), half).dtype == expected
        assert resolve(EngineConfig("m", device="cpu"), model).dtype == "float32"
    assert resolve(EngineConfig("m", device="cpu", dtype="bfloat16"), model).dtype == "bfloat16"


def test_wishes_that_cannot_be_met_name_their_flag(models):
    model = config_of(models("llama")[1])
    with pytest.raises(ConfigError, match="256 positions") as error:
        resolve(EngineConfig("m", device="cpu", max_model_len=257), model)
    assert error.value.flag == "max_model_len"
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device") as error:
            resolve(EngineConfig("m", device="cuda"), model)
        assert error.value.flag == "device"


def test_a_gpu_has_no_use_for_bound_threads(models, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = EngineConfig("m", device="cuda", cpu_omp_threads_bind="auto")
    with pytest.raises(ConfigError, match="is for device=cpu, and the device is cuda") as refused:
        resolve(asked, config_of(models("llama")[1]))
    assert refused.value.flag == "cpu_omp_threads_bind"


def test_threads_are_shared_between_ranks_unless_set(monkeypatch):
    monkeypatch.setattr("engine.threads.cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with threads(8):
        chosen = []
        for size in (1, 2, 16):
            with ThreadShare(size):
                chosen.append(torch.get_num_threads())
            assert torch.get_num_threads() == 8
        assert chosen == [6, 3, 1]
        with ThreadShare(2):
            torch.set_num_threads(5)  # somebody else's choice stands
        assert torch.get_num_threads() == 5
    with threads(2), ThreadShare(1):
        assert torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with threads(8), ThreadShare(2):
        assert torch.get_num_threads() == 8


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_shares_of_engines_at_once_are_given_back_in_any_order(order, monkeypatch):
    monkeypatch.setattr("engine.threads.cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    allowed = [4, 1, 8]
    with threads(6):
        shares = [ThreadShare(8 // count) for count in allowed]
        assert torch.get_num_threads() == 1
        left = set(range(3))
        for each in order:
            shares[each].give_back()
            shares[each].give_back()
            left.discard(each)
            assert torch.get_num_threads() == min([6, *(allowed[other] for other in left)])


def test_an_engine_leaves_no_fewer_threads_to_the_next_one(models, monkeypatch):
    _, folder = models("llama")
    monkeypatch.setattr("engine.threads.cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with threads(6):
        for size, expected in ((2, 2), (1, 4)):
            executor, _ = build_executor(config(folder, tensor_parallel_size=size))
            assert torch.get_num_threads() == expected
            executor.close()
            executor.close()
            assert torch.get_num_threads() == 6
        monkeypatch.setattr("engine.worker.executor_start.run_worker", failing_rank.run)
        for size, error in ((2, EngineDeadError), (1, ConfigError)):
            with pytest.raises(error):
                build_executor(config(folder, tensor_parallel_size=size, num_kv_blocks=None, kv_cache_memory_bytes=1))
            assert torch.get_num_threads() == 6


@pytest.mark.parametrize("blocks", [1 << 26, 1 << 55])
def test_blocks_that_no_memory_holds_are_told_with_their_size(models, blocks):
    _, folder = models("llama")
    with pytest.raises(ConfigError, match=rf"={blocks} takes \d+ bytes, which cpu does not give .*lower"):
        build_executor(config(folder, num_kv_blocks=blocks, block_size=4096))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def test_solo_executor_reports_what_came_up(models):
    _, folder = models("gpt2")
    executor, info = build_executor(EngineConfig(str(folder), device="cpu", max_num_seqs=3, block_size=16))
    assert info.vocab_size == 199
    assert info.eos_token_ids == (2,)
    assert info.config.context_len == 256
    assert info.num_kv_blocks == 3 * 16 + 1
    assert info.kv_tokens == 3 * 256
    assert info.attention_backend in ("native", "reference")
    assert info.words == f"GPT2LMHeadModel, float32, attention {info.attention_backend}"
    assert set(info.phases) == {"weights", "kv blocks", "warm-up"}
    executor.close()
    smaller = replace(info, config=replace(info.config, quantization="int8", kv_cache_dtype="fp8"))
    assert smaller.words == f"{info.words}, weights int8, KV cache fp8"
    executor.close()
    with pytest.raises(EngineDeadError):
        executor.execute(None, None)


def test_sizes_that_cannot_be_split_are_refused_before_a_process_starts(models, monkeypatch):
    monkeypatch.setattr("engine.worker.executor_start.launch", lambda *args: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match="sizes that work: 1, 2, 4") as error:
        build_executor(config(models("llama")[1], tensor_parallel_size=3))
    assert error.value.flag == "tensor_parallel_size"
    with pytest.raises(CheckpointError):
        build_executor(config("/nowhere", tensor_parallel_size=2))


@pytest.fixture
def gang(models):
    """A gang of two processes; afterwards none of them may be left."""
    _, folder = models("llama")
    executor, info = build_executor(config(folder, tensor_parallel_size=2, step_timeout=1.0))
    assert isinstance(executor, WorkerGroupExecutor)
    pids = executor._workers.pids
    yield (
        Stepper(SimpleNamespace(model=executor._runner.model, config=info.config, execute=executor.execute)),
        executor,
    )
    executor.close()
    executor.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_gang_of_processes_generates_and_dies_with_a_killed_rank(gang, models):
    stepper, executor = gang
    model, _ = models("llama")
    ragged = prompts(3, seed=6)
    check_against(model, stepper.generate(ragged, 4), ragged)
    executor.check()
    os.kill(executor._workers.pids[0], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"rank 1 .*SIGKILL"):
        stepper.generate(ragged, 2)
    with pytest.raises(EngineDeadError):
        stepper.generate(ragged, 1)


def test_a_hung_rank_ends_the_gang_by_its_deadline(gang):
    stepper, executor = gang
    stepper.generate([[3, 4, 5]], 2)
    os.kill(executor._workers.pids[0], signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"rank 1 missed the deadline .*; step_timeout is 1 s"):
        stepper.generate([[3, 4, 5]], 2)


def test_a_rank_that_fails_to_load_gives_its_reason(models, monkeypatch):
    _, folder = models("llama")
    monkeypatch.setattr("engine.worker.executor_start.run_worker", failing_rank.run)
    with pytest.raises(EngineDeadError, match=r"rank 1 .*kv_cache_memory_bytes"):
        build_executor(config(folder, tensor_parallel_size=2))


class ThreadWorkers:
    """Rank 1 as a thread of this process: what a gang looks like whose ranks were started elsewhere."""

    def __init__(self, *args):
        self.thread = ThreadPoolExecutor(1)
        self.run = self.thread.submit(worker_main, *args)

    def check(self):
        if self.run.done():
            raise EngineDeadError(f"rank 1 ended: {self.run.exception()}")

    def kill(self):
        self.thread.shutdown(wait=False)


def test_a_gang_on_several_hosts_gets_its_steps_by_broadcast(models):
    model, folder = models("llama")
    opened, prepared = prepare_model(config(folder, tensor_parallel_size=2))
    rendezvous = Rendezvous.create()
    workers = ThreadWorkers(prepared, 1, 2, rendezvous.address, None)
    executor, info = drive_worker_group(prepared, opened, rendezvous, None, workers)
    own = SimpleNamespace(model=executor._runner.model, config=info.config, execute=executor.execute)
    ragged = prompts(3, seed=9)
    check_against(model, Stepper(own).generate(ragged, 4), ragged)
    executor.close()
    assert workers.run.exception(timeout=10) is None


def test_kv_heads_are_shared_where_ranks_outnumber_them(models):
    model, folder = models("qwen3")
    rendezvous = Rendezvous.create()
    with ThreadPoolExecutor(4) as threads:
        ranks = list(
            threads.map(
                lambda rank: ModelRunner(
                    config(folder), connect(rank, 4, rendezvous.address if rank else rendezvous, "cpu", 60.0)
                ),
                range(4),
            )
        )

        def execute(inputs, draws):
            # All of them: one that is still in this step must not be taken into the next by another thread.
            first, *_ = threads.map(
                lambda runner: runner.execute(inputs, None if runner.group.rank else draws), ranks
            )
            return first

        ragged = prompts(3, seed=10)
        gang = Stepper(SimpleNamespace(model=ranks[0].model, config=ranks[0].config, execute=execute))
        check_against(model, gang.generate(ragged, 4), ragged)
        for runner in ranks:
            runner.group.close()


def test_greedy_and_seeded_rows_share_a_step(models):
    _, folder = models("llama")
    stepper = Stepper(ModelRunner(config(folder), SoloGroup()))
    ragged = prompts(4, seed=7)
    greedy = [s.tokens[-1] for s in stepper.generate(ragged, 1)]
    sequences = [Sequence(list(prompt)) for prompt in ragged]
    counts = {i: len(prompt) for i, prompt in enumerate(ragged)}
    outputs = stepper.step(counts, sequences, temperature=[0, 5, 0, 5], seeds=np.arange(4))
    assert outputs.token_ids[[0, 2]].tolist() == [greedy[0], greedy[2]]
    assert outputs.token_ids[[1, 3]].tolist() != [greedy[1], greedy[3]]
