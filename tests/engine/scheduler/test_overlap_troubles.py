"""Random histories of overlapping steps with what comes in between: no memory, sleep, deadlines, questions."""

import copy
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from engine.errors import StepMemoryError
from tests.engine.engine_driver import VOCAB, request
from tests.engine.late_executor import LateExecutor, snapshot
from tests.engine.scheduler.test_engine_state_machine import CONTEXT, PROMPT, PromptDriver, shapes, undisturbed
from tests.engine.scheduler.test_overlap_properties import MixedMachine


class CrampedExecutor(LateExecutor):
    """Has no memory for the next step that is launched beside another, and finds that out at once or half-way."""

    core = None
    refuses = half_way = False

    def launch(self, inputs, sampling):
        if not (self.refuses and self.core._scheduler.is_ahead):
            return super().launch(inputs, sampling)
        self.refuses = False
        if self.half_way:
            whole = copy.deepcopy(inputs), snapshot(sampling)
            for step in list(self.queue):
                self.run_until(step)
            self.execute(*whole)
        raise StepMemoryError("no room")


class TroubledMachine(MixedMachine):
    @initialize(shape=shapes, tokens=st.integers(10, 44))
    def start(self, shape, tokens):
        shape = {**shape, **self.settings}
        blocks = 1 + tokens // shape["block_size"]
        self.cramped = CrampedExecutor(blocks, shape["block_size"], VOCAB)
        self.driver = PromptDriver(num_blocks=blocks, executor=self.cramped, max_model_len=CONTEXT, **shape)
        self.cramped.core = self.driver.core
        self.accepted, self.aborted, self.cut_short = {}, set(), set()

    @rule(half_way=st.booleans())
    def step_without_memory(self, half_way):
        self.cramped.refuses, self.cramped.half_way = True, half_way
        self.driver.step()
        self.cramped.refuses = False

    @rule(level=st.sampled_from([1, 2]), steps=st.integers(0, 2))
    def sleep(self, level, steps):
        self.driver.core.sleep(level)
        for _ in range(steps):
            self.driver.step()
        self.driver.core.wake_up()
        self.driver.step()  # what was on its way is told now, if it was not before

    @rule()
    def ask_for_costs(self):
        self.driver.costs()

    @rule(shared=st.sampled_from([1, 4, 8, 19]), n=st.integers(1, 2), seconds=st.integers(1, 6))
    def add_with_deadline(self, shared, n, seconds):
        one = request(f"r{len(self.accepted)}", PROMPT[:shared], n=n, max_tokens=16, ignore_eos=True)
        self.submit(replace(one, deadline=self.driver.now + seconds))

    def check(self, one, request_id, index):
        if self.driver.finished[request_id, index].code == "deadline_exceeded":
            got = self.driver.tokens[request_id, index]
            assert got == undisturbed(replace(one, deadline=None))[index][0][: len(got)]
        else:
            super().check(replace(one, deadline=None), request_id, index)


TestTroubled = TroubledMachine.TestCase
TestTroubled.settings = settings(max_examples=40, stateful_step_count=30)
