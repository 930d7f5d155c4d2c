"""Random histories of an engine whose steps overlap on a device that is truly late: nothing changes but the time.

Same tokens as without, none lost, none extra, one end each, and no block found before it was computed.
"""

from hypothesis import settings
from hypothesis.stateful import invariant

from tests.unit.test_engine_state_machine import EngineMachine


class OverlapMachine(EngineMachine):
    """Adds, steps, aborts, cuts short, migrates and forgets, with a step in flight all the while."""

    settings = {"async_scheduling": True}  # noqa: RUF012

    @invariant()
    def found_when_computed(self):
        if hasattr(self, "driver"):
            self.driver.executor.check_findable(self.driver.core._blocks)

    def teardown(self):
        super().teardown()
        if hasattr(self, "driver"):
            self.found_when_computed()
            assert self.driver.core._flying is None or self.driver.core._flying.schedule.is_unwanted


TestOverlap = OverlapMachine.TestCase
TestOverlap.settings = settings(max_examples=60, stateful_step_count=25)
