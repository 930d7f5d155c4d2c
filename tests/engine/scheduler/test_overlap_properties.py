"""Random histories of an engine whose steps overlap on a device that is truly late: nothing changes but the time.

Same tokens as without, none lost, none extra, one end each, and no block found before it was computed.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from tests.engine.engine_driver import request
from tests.engine.scheduler.test_engine_state_machine import PROMPT, EngineMachine, of_a_request, shapes

# What no step waits for: the others, of `EngineMachine`, hold up every step while they live.
free_params = st.fixed_dictionaries(
    {
        "n": st.sampled_from([1, 1, 1, 2]),
        "temperature": st.sampled_from([0.0, 1.0]),
        "max_tokens": st.integers(1, 16),
        "ignore_eos": st.booleans(),
    },
    optional={
        "min_tokens": st.integers(0, 1),
        "stop_token_ids": st.sampled_from([tuple(range(3, 60, 9)), tuple(range(1, 60, 4))]),
        "logit_bias": st.just({7: -1.0, 9: 1.0}),
        "logprobs": st.just(1),
        "presence_penalty": st.just(0.5),
        "bad_words_ids": st.just(((5,), (3, 4), (11, 12, 13))),
    },
)


class MixedMachine(EngineMachine):
    """All that the engine is put through without overlap, with a step in flight all the while."""

    settings = {"async_scheduling": True}  # noqa: RUF012

    @initialize(shape=shapes, tokens=st.integers(10, 44))
    def start(self, shape, tokens):
        super().start(shape, tokens)
        batch = self.driver.core._scheduler._batch
        preempt = batch.preempt

        def checked(now):
            assert not batch.in_flight, "preempted while a step runs"
            return preempt(now)

        batch.preempt = checked

    @invariant()
    def found_when_computed(self):
        if hasattr(self, "driver"):
            self.driver.executor.check_findable(self.driver.core._blocks)

    @invariant()
    def told_when_known(self):
        """What is told of a sequence counts no token that is in flight."""
        if hasattr(self, "driver"):
            for key, finish in self.driver.finished.items():
                one = self.accepted[key[0]]
                told = len(self.log(one, key[1])) + len(self.driver.tokens[key])
                assert finish.sequence.num_output_tokens == told

    def teardown(self):
        super().teardown()
        if hasattr(self, "driver"):
            self.found_when_computed()
            self.told_when_known()
            drawn = sum(map(len, self.driver.tokens.values()))
            assert self.driver.core.stats().generated_tokens == drawn
            assert not self.driver.core._in_flight.is_wanted


class OverlapMachine(MixedMachine):
    """Mostly requests that no step waits for, so that nearly all steps are ahead."""

    add_pooled = None

    @rule(
        target=EngineMachine.ids,
        shared=st.sampled_from([1, 2, 4, 8, 12, 19]),
        asked=free_params,
        **of_a_request,
    )
    def add(self, shared, own, asked, seed, priority, salt):
        return super().add(shared, own, asked, seed, priority, salt)

    @rule(data=st.data(), asked=free_params, seed=st.integers(0, 2), shared=st.sampled_from([1, 2, 5]))
    def take_over(self, data, asked, seed, shared):
        """Abort one that runs and let another come at once, for its slot and its blocks."""
        live = [one for one in self.accepted if self.is_live(one)]
        if live:
            self.abort(data.draw(st.sampled_from(live)))
            self.submit(request(f"r{len(self.accepted)}", PROMPT[shared : 2 * shared], seed, **asked))
            self.driver.step()


TestMixed = MixedMachine.TestCase
TestMixed.settings = settings(max_examples=25, stateful_step_count=25)
TestOverlap = OverlapMachine.TestCase
TestOverlap.settings = settings(max_examples=60, stateful_step_count=30)
