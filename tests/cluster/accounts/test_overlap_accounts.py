"""Times and accounts of steps that overlap: nothing is counted twice, nobody goes free."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.engine_driver import VOCAB, Driver, request
from tests.engine.late_executor import LateExecutor


class Timed(LateExecutor):
    """Each step takes a second of the device, from when it is launched or the one before it has run."""

    def __init__(self):
        super().__init__(64, 4, VOCAB)
        self.now = 0.0
        self.free_at = 0.0

    def launch(self, inputs, sampling):
        step = super().launch(inputs, sampling)
        step.ends_at = self.free_at = max(self.free_at, self.now) + 1.0
        return step

    def run_until(self, wanted):
        super().run_until(wanted)
        self.now = max(self.now, wanted.ends_at)


class TimedDriver(Driver):
    """The clock is the executor's; each call of `step` begins `gap` seconds after the last one ended."""

    gap = 0.0

    @property
    def now(self):
        return self.executor.now if "executor" in vars(self) else 0.0

    @now.setter
    def now(self, value):
        if value:
            self.executor.now += self.gap


def test_device_seconds_are_counted_once_and_phases_are_true():
    driver = TimedDriver(executor=Timed(), async_scheduling=True)
    driver.gap = 0.25
    driver.core.add(request("a", 3, max_tokens=5, ignore_eos=True))
    reports = []
    while driver.core.has_unfinished:
        reports.append(driver.step())
        driver.executor.now += 0.125 * driver.core.has_unfinished
        assert driver.costs().idle.device_ns == 10**9 // 4, "a step runs all the while"
    assert driver.executor.now == 0.25 + 5.0, "the host's quarters of a second are hidden but for the first"
    assert [report.executed for report in reports] == [1.0] * 5
    assert [report.seconds for report in reports] == [1.0] * 5
    assert driver.costs().tenants[""].device_ns == 5 * 10**9
    assert driver.costs().idle.device_ns == 10**9 // 4
    sequence = driver.finished["a", 0].sequence
    assert driver.accounts.used(sequence).device_ns == 5 * 10**9
    assert (sequence.phases.prefill, sequence.phases.decode) == (1.0, 4.0)


def test_a_first_token_comes_when_it_is_told_and_not_when_it_is_launched():
    driver = TimedDriver(executor=Timed(), async_scheduling=True)
    driver.core.add(request("a", 3, max_tokens=9, ignore_eos=True))
    driver.step()
    driver.core.add(request("b", (9, 8), max_tokens=2, ignore_eos=True))
    driver.drain()
    phases = driver.finished["b", 0].sequence.phases
    assert (phases.queue, phases.prefill, phases.decode) == (0.0, 2.0, 1.0), "a step runs as it comes"


def test_who_leaves_in_flight_pays_for_its_part_of_the_step():
    driver = TimedDriver(executor=Timed(), async_scheduling=True)
    for name, prompt in (("stays", 4), ("leaves", 6)):
        tenant = replace(request(name, prompt, max_tokens=9, ignore_eos=True), tenant=name)
        driver.core.add(tenant)
    driver.step()
    driver.core.abort("leaves")
    driver.step()
    tenants = driver.costs().tenants
    assert tenants["leaves"].device_ns == 600_000_000 + 500_000_000
    assert driver.accounts.used(driver.finished["leaves", 0].sequence).device_ns == tenants["leaves"].device_ns
    assert tenants["stays"].device_ns == 400_000_000 + 500_000_000


@settings(max_examples=60)
@given(
    actions=st.lists(
        st.tuples(st.just("add"), st.sampled_from("abc"), st.integers(1, 12), st.integers(1, 9), st.integers(1, 2))
        | st.tuples(st.just("step"), st.floats(0, 2))
        | st.tuples(st.just("abort"), st.integers(0, 12)),
        max_size=40,
    )
)
def test_accounts_add_up_whoever_leaves_in_flight(actions):
    driver = TimedDriver(executor=Timed(), async_scheduling=True, num_blocks=20, max_num_seqs=4)
    added = 0
    for what, *more in actions:
        if what == "add":
            tenant, prompt, most, n = more
            asked = request(f"r{added}", prompt, seed=added, temperature=1.0, max_tokens=most, n=n)
            driver.core.add(replace(asked, tenant=tenant, cache_salt=tenant.encode()))
            added += 1
        elif what == "abort":
            driver.core.abort(f"r{more[0]}")
        else:
            driver.gap = more[0]
            driver.step()
    driver.drain()
    costs = driver.costs()
    for name in ("device_ns", "block_ns"):
        told = sum(getattr(driver.accounts.used(finish.sequence), name) for finish in driver.finished.values())
        assert told == sum(getattr(usage, name) for usage in costs.tenants.values())
