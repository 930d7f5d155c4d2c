"""What steps and requests took, computed from scripted runs on a clock of the test's own."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.replica.host import replica_metrics
from cluster.telemetry.step_metrics import StepMetrics
from engine.errors import StepMemoryError
from engine.report import SamplingInputs, StepInputs, StepOutputs
from engine.request import FinishReason, PhaseTimes
from tests.cluster.cluster_lab import Lab, long_request, until
from tests.engine.engine_driver import VOCAB, Driver, request
from tests.fake_executor import FakeExecutor


def sample(metrics, name: str, **labels: str) -> float:
    """Return the one value of a series that has at least these labels."""
    found = [
        one.value
        for metric in metrics
        for one in metric.samples
        if one.name == f"squadron_{name}" and labels.items() <= one.labels.items()
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


class Timed(FakeExecutor):
    """A model whose steps take time on the driver's clock: 0.25 s for telling the ranks, 0.5 s for the model."""

    driver: Driver
    failures = 0

    def execute(self, inputs: StepInputs, sampling: SamplingInputs) -> StepOutputs:
        self.driver.now += 0.75
        if self.failures:
            self.failures -= 1
            raise StepMemoryError("none left")
        return replace(super().execute(inputs, sampling), channel=0.25)


def timed(num_blocks: int = 64, **settings) -> Driver:
    """A driver each of whose steps begins a second after the one before had run."""
    executor = Timed(num_blocks, 4, VOCAB)
    executor.driver = Driver(num_blocks, executor, **settings)
    return executor.driver


def phases(driver: Driver, name: str, choice: int = 0) -> PhaseTimes | None:
    return driver.finished[name, choice].sequence.phases


def test_phases_of_a_request_that_waits_is_chunked_and_decodes() -> None:
    driver = timed(max_num_seqs=1)
    driver.core.add(request("a", 20, max_tokens=2, ignore_eos=True))  # chunks of 16 and 4
    driver.core.add(request("b", 3, max_tokens=3, ignore_eos=True))
    driver.drain()
    # Steps begin at 1, 2.75, 4.5 ... and have run 0.75 later.
    assert phases(driver, "a") == PhaseTimes(queue=1.0, prefill=2.5, decode=1.75)
    assert phases(driver, "b") == PhaseTimes(queue=6.25, prefill=0.75, decode=3.5)
    assert phases(driver, "b").inference == 4.25


def test_choices_that_share_a_prompt_start_with_it() -> None:
    driver = timed()
    driver.run(request("a", 5, n=2, max_tokens=3, ignore_eos=True, temperature=1.0))
    assert phases(driver, "a", 0) == phases(driver, "a", 1) == PhaseTimes(queue=1.0, prefill=0.75, decode=3.5)


def test_a_pooled_request_has_no_decoding() -> None:
    driver = timed()
    driver.run(replace(request("a", 20, max_tokens=1), pooling="mean"))
    assert phases(driver, "a") == PhaseTimes(queue=1.0, prefill=2.5, decode=0.0)


def test_one_that_goes_on_here_has_its_first_token_here() -> None:
    driver = timed()
    driver.run(replace(request("a", 5, max_tokens=6, ignore_eos=True), resume={0: (3, 4, 5)}))
    assert phases(driver, "a") == PhaseTimes(queue=1.0, prefill=0.75, decode=3.5)


def test_what_ended_without_a_token_has_no_phases() -> None:
    driver = timed(max_num_seqs=1)
    driver.core.add(request("a", 3))
    driver.core.add(request("b", 3))
    driver.step()
    driver.core.abort("b")
    driver.drain()
    assert phases(driver, "b") is None
    assert phases(driver, "a") is not None


def test_an_abort_counts_until_the_last_step_before_it() -> None:
    driver = timed()
    driver.core.add(request("a", 3, max_tokens=20, ignore_eos=True))
    driver.step()
    driver.step()
    driver.now += 100.0
    driver.core.abort("a")
    driver.drain()
    assert phases(driver, "a") == PhaseTimes(queue=1.0, prefill=0.75, decode=1.75)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(1, 3), st.integers(0, 4)), min_size=1,
             max_size=8),
    st.integers(18, 40),
)  # fmt: skip
def test_phases_add_up_to_the_time_in_the_engine(work: list[tuple[int, int, int, int]], num_blocks: int) -> None:
    """Whatever waits, is chunked, shares prompts or is preempted.

    work: length of the prompt, tokens, choices, steps before it comes.
    """
    driver = timed(num_blocks, max_num_seqs=4)
    came: dict[str, float] = {}
    ended: dict[tuple[str, int], float] = {}
    due = list(itertools.accumulate(later for *_, later in work))
    for step in range(5000):
        for number, (prompt, tokens, choices, _) in enumerate(work):
            if due[number] == step:
                came[f"r{number}"] = driver.now
                driver.core.add(request(f"r{number}", prompt, number, n=choices, max_tokens=tokens, temperature=1.0))
        if driver.core.has_unfinished:
            ran_until = driver.now + 1.75
            report = driver.step()
            ended |= {(f.sequence.request.request_id, f.sequence.index): ran_until for f in report.finished}
        elif step > max(due):
            break
    assert len(ended) == sum(choices for _, _, choices, _ in work)
    for (name, choice), until_then in ended.items():
        told = phases(driver, name, choice)
        assert told is not None
        assert min(told.queue, told.prefill, told.decode) >= 0
        assert told.queue + told.prefill + told.decode == pytest.approx(until_then - came[name])
        assert told.inference == told.prefill + told.decode


def test_times_and_sizes_of_steps() -> None:
    driver = timed(max_num_batched_tokens=16)
    figures = StepMetrics("demo", 16)
    driver.core.add(request("a", 20, max_tokens=2, ignore_eos=True))
    driver.core.add(request("b", 2, max_tokens=2, ignore_eos=True))
    while driver.core.has_unfinished:
        figures.note(driver.step())
    found = list(figures.collect(5))
    # 16 tokens of a; 4 of a and 2 of b; one of each.
    assert sample(found, "iteration_tokens_total_sum") == 16 + 6 + 2
    assert sample(found, "iteration_tokens_total_bucket", le="8.0") == 2
    assert sample(found, "step_batch_size_sum") == 1 + 2 + 2
    assert sample(found, "step_budget_used_ratio_sum") == (16 + 6 + 2) / 16
    assert sample(found, "step_seconds_sum") == 3 * 0.75
    assert sample(found, "step_device_seconds_sum") == 3 * 0.5
    assert sample(found, "step_channel_seconds_sum") == 3 * 0.25
    assert sample(found, "step_host_seconds_sum") == 0.0
    assert sample(found, "step_host_seconds_count") == 3
    assert sample(found, "rank_forward_seconds_sum") == 3 * 0.5
    assert sample(found, "engine_choices_ended_total", reason="length") == 2
    assert sample(found, "request_queue_time_seconds_sum") == 1.0 + 2.75
    assert sample(found, "request_prefill_time_seconds_sum") == 2.5 + 0.75
    assert sample(found, "request_decode_time_seconds_sum") == 1.75 + 1.75
    assert sample(found, "request_inference_time_seconds_sum") == 4.25 + 2.5
    assert sample(found, "rows_unwanted_total") == 5


def test_a_step_that_had_to_be_tried_again_took_both_times() -> None:
    driver = timed()
    driver.executor.failures = 1
    driver.core.add(request("a", 3, max_tokens=1))
    driver.core.add(request("b", 3, max_tokens=1))
    report = driver.step()
    assert (report.seconds, report.executed, report.channel) == (1.5, 1.5, 0.25)
    assert report.num_sequences == 1
    assert [finish.reason for finish in report.finished].count(FinishReason.ERROR) == 1


def test_ends_are_told_by_the_code_of_their_error() -> None:
    driver = timed()
    figures = StepMetrics("demo", 16)
    driver.core.add(replace(request("a", 3), deadline=0.5))
    driver.core.add(request("b", 3))
    driver.core.abort("b")
    while driver.core.has_unfinished:
        figures.note(driver.step())
    found = list(figures.collect(0))
    assert sample(found, "engine_choices_ended_total", reason="deadline_exceeded") == 1
    assert sample(found, "engine_choices_ended_total", reason="abort") == 1
    assert sample(found, "iteration_tokens_total_count") == 0
    assert sample(found, "request_queue_time_seconds_count") == 0


def test_who_waits_longest_is_known_also_after_a_preemption() -> None:
    driver = Driver(num_blocks=10, max_num_seqs=2)
    assert driver.core.stats().waits_since is None
    driver.now = 5.0
    driver.core.add(request("a", 12, max_tokens=20, ignore_eos=True))
    driver.now = 7.0
    driver.core.add(request("b", 12, max_tokens=20, ignore_eos=True))
    assert driver.core.stats().waits_since == 5.0
    driver.step()
    while not (report := driver.step()).stats.preemptions:
        assert report.stats.waits_since is None or report.stats.waits_since == 7.0
    assert report.stats.waits_since == driver.now, "the one that was preempted waits anew"
    driver.drain()
    assert driver.core.stats().waits_since is None


async def test_a_replica_tells_of_its_queue_refusals_and_what_nobody_wanted() -> None:
    async with Lab(max_num_seqs=1) as lab:
        replica = await lab.start("a", steps=0)
        asked = [asyncio.create_task(lab.collect(long_request(name))) for name in ("first", "second")]
        await until(lambda: replica.core.num_requests == 2)
        replica.core.metrics.refused("internal_error")
        replica.executor.allow(3)
        await until(lambda: replica.core.stats.num_waiting == 1)
        found = list(replica_metrics(replica.core))
        assert sample(found, "submits_refused_total", code="internal_error") == 1
        assert sample(found, "num_requests_waiting", replica="a") == 1
        assert sample(found, "replica_queue_age_seconds") > 0
        assert sample(found, "kv_blocks", replica="a", state="held") > 0
        assert sample(found, "device_seconds_total", replica="a") > 0
        assert sample(found, "rank_memory_bytes", kind="host") > 10**6
        replica.executor.allow(10**6)
        await asyncio.gather(*asked)
