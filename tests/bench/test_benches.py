"""What the benches of README.md measure is what they say: the engine's own step, requests from their own arrival."""

from __future__ import annotations

import asyncio
import json
import os
import time
from datetime import UTC, datetime

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from tests import tiny_tokenizer
from tests.bench import host_step, implementations, offline, ray_llm, router, served, side_by_side
from tests.bench.host_step import VOCAB, ReadyTokens
from tests.bench.random_model import Load
from tests.parity.tiny_models import make


def test_host_step_times_the_engines_own_step(monkeypatch):
    steps = []
    real = EngineCore.step

    def step(core):
        steps.append(core)
        time.sleep(0.002)
        return real(core)

    load = host_step.Load(4)
    monkeypatch.setattr(EngineCore, "step", step)
    assert all(took > 2000 for took in load.run(5))
    assert steps == [load.core] * 5


def test_what_the_executor_takes_is_left_out(monkeypatch):
    load = host_step.Load(4)
    launch = load._executor.launch

    def slow(inputs, sampling):
        time.sleep(0.05)
        load._executor.spent += 0.05
        return launch(inputs, sampling)

    monkeypatch.setattr(load._executor, "launch", slow)
    assert min(load.run(5)) < 50_000


def test_the_stages_of_a_step_are_parts_of_it():
    load = host_step.Load(8, output_len=40)
    load.run(20)
    stages = load.run_in_stages(40)
    assert stages.keys() == set(host_step.STAGES)
    assert all(value > 0 for value in stages.values())
    assert "schedule" not in vars(load.core._scheduler), "the clocks are gone again"


def test_tokens_come_one_to_a_chunk_where_the_engine_is_slow_enough(monkeypatch):
    async def remote(streams, tokens, seconds, step=0.0):
        asked.append(step)
        return streams / step, 1.0 if step >= 0.002 else 3.0

    asked = []
    monkeypatch.setattr(router, "remote_tokens_per_s", remote)
    rate, size = asyncio.run(router.single_tokens_per_s(32, 1.0))
    assert size == 1.0
    assert 0.8 * 32 / 0.002 < rate <= 32 / 0.002
    assert len(asked) == router.SEARCHES


def test_a_paced_engine_begins_its_steps_as_it_was_told():
    core = EngineCore(EngineConfig("none", max_model_len=64), router.PacedTokens(0.02), (2,), VOCAB, 40)
    began = time.perf_counter()
    core.add(router.Request("r", (5, 6, 7), router.SamplingParams(max_tokens=10, ignore_eos=True)))
    while core.has_unfinished:
        core.step()
    assert time.perf_counter() - began > 9 * 0.02


def test_the_bare_engine_is_offered_each_request_at_its_time_and_its_wait_counts_from_there():
    core = EngineCore(EngineConfig("none", max_model_len=1024), ReadyTokens(), (2,), VOCAB, 400)
    taken = []
    add = core.add
    core.add = lambda request: (taken.append(time.perf_counter() - began), add(request))
    arrivals = [0.0, 0.8, 1.6]
    began = time.perf_counter()
    waits, rate = served.run_bare(core, [1, 2, 3], arrivals)
    whole = time.perf_counter() - began
    assert all(due <= at < due + 0.7 for due, at in zip(arrivals, taken, strict=True))
    assert len(waits) == 3 and all(0 < wait < 0.7 for wait in waits), "one that came at 1.6 s has not waited for it"
    assert rate == pytest.approx(3 * served.OUTPUT_TOKENS / whole, rel=0.05)


def test_when_requests_came_is_read_off_their_spans(tmp_path):
    file = tmp_path / "spans.jsonl"
    assert served.queued(file) == []
    times = {"queue": [3.5, 1.25], "prefill": [2.0]}
    spans = [
        {"name": name, "start_time": datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")}
        for name, each in times.items()
        for at in each
    ]
    file.write_text("".join(json.dumps(span) + "\n" for span in spans))
    assert served.queued(file) == [1.25, 3.5]


def test_ratios_say_how_many_times_faster_in_each_way_to_compare():
    found = {
        "squadron": {"tokens_per_s": 300.0, "even_tokens_per_s": 400.0, "tpot_ms": 10.0},
        "transformers": {"tokens_per_s": 100.0, "even_tokens_per_s": 200.0, "tpot_ms": 25.0},
        "continuous": {"tokens_per_s": 150.0},
    }
    stem = "offline_vs_transformers"
    assert offline.ratios(found, "float32") == {
        f"{stem}_static": 3.0, f"{stem}_even": 2.0, f"{stem}_continuous": 2.0, f"{stem}_alone": 2.5,
    }  # fmt: skip
    assert f"{stem}_static_bfloat16" in offline.ratios(found, "bfloat16")


def test_implementations_take_turns_and_are_compared_by_load(monkeypatch):
    turns = []

    def in_process(implementation, folder):
        turns.append(implementation)
        return {"1": 60.0 - 20 * implementations.IMPLEMENTATIONS.index(implementation)}

    monkeypatch.setattr(implementations, "_in_process", in_process)
    monkeypatch.setattr(implementations, "save_model", lambda kind, folder: 100_000_000)
    found = implementations.measure(2, ["moe"])
    assert turns == [*implementations.IMPLEMENTATIONS] * 2
    assert found["implementations_moe_native_vs_generate_1"] == 3.0
    assert found["implementations_moe_fallback_of_native_1"] == 40.0 / 60.0


def test_tokens_per_second_are_of_what_was_asked_for():
    loads = []

    def generate(prompts, outputs):
        loads.append((len(prompts), sum(outputs)))
        return 2.0

    found = implementations.run_loads(generate)
    assert {name: value * 2.0 for name, value in found.items()} == dict(
        zip(("1", "8", "64", "64_even"), (tokens for _, tokens in loads[1:]), strict=True)
    )
    assert [sequences for sequences, _ in loads] == [8, 1, 8, 64, 64]


def test_three_runs_are_told_with_their_spread(monkeypatch):
    assert offline.summary({"a": [3.0, 1.0, 2.0], "b": [5.0]}) == {"a": 2.0, "a_least": 1.0, "a_most": 3.0, "b": 5.0}
    turns = []

    def in_process(engine, folder, dtype):
        turns.append(engine)
        return {"tokens_per_s": 100.0 * len(turns), "even_tokens_per_s": 1.0, "tpot_ms": 1.0}

    monkeypatch.setattr(offline, "_in_process", in_process)
    monkeypatch.setattr(offline, "save_random_model", lambda folder: None)
    monkeypatch.setattr(offline, "has_bf16_units", lambda: False)
    found = offline.measure(3)
    assert turns == ["squadron", "squadron", "transformers", "continuous"] * 3, "they take turns"
    assert found["offline_100m_float32_tokens_per_s"] == 600.0
    assert (found["offline_vs_transformers_static_least"], found["offline_vs_transformers_static_most"]) == (
        pytest.approx(2 / 3), pytest.approx(10 / 11),
    )  # fmt: skip


def test_continuous_batching_gives_each_sequence_its_own_length(tmp_path, monkeypatch):
    make("qwen3", tmp_path)
    tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path)
    load = Load([[5, 6, 7], [8] * 20, [9] * 11, *[[10 + i] for i in range(6)]], [4, 9, 1, *[3] * 6])
    monkeypatch.setattr(offline, "make_load", lambda vocab: load)
    monkeypatch.setattr(offline, "PAGES", 32)
    before = torch.get_num_threads()
    found = offline.continuous(tmp_path, "float32")
    assert torch.get_num_threads() == before
    assert found["tokens_per_s"] > 0


def test_an_even_load_pads_nothing():
    load = offline.even_load(1000)
    assert {len(prompt) for prompt in load.prompts} == {128}
    assert set(load.outputs) == {80}
    assert len({tuple(prompt) for prompt in load.prompts}) == 64


def test_ray_serve_llm_serves_again_when_two_others_do():
    read, write = os.pipe()
    with os.fdopen(read) as pipe, os.fdopen(write, "w", buffering=1) as server:

        def say(states, *pids):
            server.write(json.dumps({"states": states, "pids": pids}) + "\n")

        told = ray_llm.Told(pipe)
        say({"RUNNING": 2}, 11, 12)
        assert told.wait(10) < float("inf")
        assert told.replicas == [11, 12]
        assert told.wait(0.1, without=11) == float("inf"), "Serve has not seen it die yet"
        say({"RUNNING": 1, "STARTING": 1}, 12, 13)
        assert told.wait(0.1, without=11) == float("inf")
        say({"RUNNING": 2}, 12, 13)
        assert told.wait(10, without=11) < float("inf")
        server.close()
        with pytest.raises(RuntimeError, match="has ended"):
            told.wait(10, without=12)


def test_sides_are_compared_round_by_round_whatever_the_machine_does_meanwhile():
    middle, low, high = side_by_side.ratio([11.0, 22.0, 110.0, 5.5], [10.0, 20.0, 100.0, 5.0])
    assert [middle, low, high] == pytest.approx([1.1, 1.1, 1.1])
    sides = [side_by_side.Side("before", 1), side_by_side.Side("after", 2)]
    for side, factor in zip(sides, (1.0, 0.5), strict=True):
        for streams in served.STREAMS:
            side.figures[side_by_side.TTFT, streams] = [40.0 * factor, 60.0 * factor]
            side.figures[side_by_side.RATE, streams] = [100.0, 300.0]
    lines = side_by_side.table(sides).splitlines()
    assert lines[0] == "before, 1 streams, first token, ms: 50.0"
    assert lines[2] == "after, 1 streams, first token, ms: 25.0, x0.500 (0.500 to 0.500) of before"
    assert len(lines) == 4 * len(served.STREAMS)
