"""How the status of a batch changes, and that nothing of it is taken back."""

from contextlib import suppress
from itertools import pairwise

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from openai.types import Batch

from cluster.batch.errors import FencedError, IllegalChangeError
from cluster.batch.server.ids import BATCH_IDS
from cluster.batch.server.objects import AFTER, BatchRecord
from cluster.batch.server.root import open_root
from cluster.batch.server.store import Store
from cluster.errors import ApiError
from tests.cluster.batch.store_lab import COUNTS, NOW, OUTCOME, WAYS, batch_of, keep, record

ENDED = {"failed", "completed", "expired", "cancelled"}


@pytest.mark.parametrize("status", AFTER)
@pytest.mark.parametrize("wanted", WAYS)
def test_a_change_is_legal_or_raises(status, wanted):
    before = record(status=status)
    if wanted not in AFTER[status]:
        with pytest.raises(IllegalChangeError, match=f"is {status} and cannot become {wanted}"):
            WAYS[wanted](before)
        return
    after = WAYS[wanted](before)
    assert after.status == wanted
    assert getattr(after, f"{wanted}_at") >= NOW
    assert (after.id, after.created_at) == (before.id, before.created_at)
    assert msgspec.json.decode(msgspec.json.encode(after), type=BatchRecord) == after
    Batch.model_validate(after.shown(), strict=True)


def test_nothing_follows_an_end_and_all_else_comes_to_one():
    assert {status for status, after in AFTER.items() if not after} == ENDED
    assert set().union(*AFTER.values()) == set(WAYS)


def test_a_whole_life_has_all_its_times():
    one = record()
    for wanted in ("in_progress", "finalizing", "completed"):
        one = WAYS[wanted](one)
    times = [one.created_at, one.in_progress_at, one.finalizing_at, one.completed_at]
    assert all(early < late for early, late in pairwise(times))
    shown = Batch.model_validate(one.shown(), strict=True)
    assert (shown.output_file_id, shown.error_file_id, shown.model) == ("file-out", "file-err", "demo")
    assert (shown.usage.total_tokens, shown.request_counts.failed) == (12, 1)


def test_a_failed_batch_says_why():
    shown = Batch.model_validate(WAYS["failed"](record()).shown(), strict=True)
    assert [(one.code, one.line, one.message) for one in shown.errors.data] == [("bad", 7, "it is")]
    with pytest.raises(IllegalChangeError, match="without an error"):
        record().failed(NOW, [])


def test_a_batch_counts_only_while_it_runs():
    running = record().begun(NOW, 3)
    assert running.counted(COUNTS).request_counts == COUNTS
    for status in ("validating", *ENDED):
        with pytest.raises(IllegalChangeError, match="no rows of it run"):
            record(status=status).counted(COUNTS)


class Life(RuleBasedStateMachine):
    """One batch among runners that come and go, clients that cancel it, and processes that die between two writes.

    Each runner knows the batch as it last saw it, and changes it from there, however long ago that was.
    """

    def __init__(self):
        super().__init__()
        self.store = Store(open_root(f"memory://life-{BATCH_IDS.new('a')}"), 1)
        self.batch = batch_of(self.store, keep(self.store))
        self.known = {}
        self.seen = [self.batch]

    @rule(runner=st.sampled_from("ABC"))
    def takes_over(self, runner):
        now = self.store.batches.read(self.batch.id)
        if not now.ended:
            self.known[runner] = self.store.batches.change(now, lambda one: one.taken(runner))

    @rule(runner=st.sampled_from("ABC"), way=st.sampled_from(["in_progress", "finalizing", "failed", "ended"]))
    def changes_what_it_knows(self, runner, way):
        if (record := self.known.get(runner)) is None:
            return
        try:
            to = (lambda one: one.finished(NOW + 86_400, OUTCOME)) if way == "ended" else WAYS[way]
            self.known[runner] = self.store.batches.change(record, to)
            assert self.known[runner].runner == runner
        except FencedError:
            now = self.store.batches.read(self.batch.id)
            assert now.ended or now.runner != runner, "only who lost it is refused"
            del self.known[runner]
        except IllegalChangeError:
            return

    @rule(runner=st.sampled_from("ABC"))
    def tells_how_far_it_is(self, runner):
        if runner in self.known:
            self.store.batches.note(self.known[runner])  # that it lost the batch it may not know yet

    @rule(runner=st.sampled_from("ABC"))
    def looks(self, runner):
        if runner in self.known:
            with suppress(FencedError):
                self.known[runner] = self.store.batches.follow(self.known[runner])

    @rule()
    def is_cancelled(self):
        with suppress(ApiError):
            assert self.store.cancel_batch(self.batch.id, "a").status in ("cancelling", "cancelled")

    @rule()
    def is_cancelled_by_a_router_that_dies_at_once(self):
        now = self.store.batches.read(self.batch.id)
        if "cancelling" in AFTER[now.status]:
            after = msgspec.structs.replace(now.cancelling(NOW), number=now.number + 1)
            path = f"batches/{now.id}/state-{after.number}.json"
            assert self.store.root.create(path, msgspec.json.encode(after))

    @invariant()
    def nothing_is_taken_back(self):
        found, before = self.store.batch(self.batch.id, "a"), self.seen[-1]
        assert found.number >= before.number
        if found.number == before.number:
            assert found.status == before.status
        reachable = {before.status}
        for _ in AFTER:
            reachable |= {one for status in reachable for one in AFTER[status]}
        assert found.status in reachable
        assert not before.ended or found == before
        self.seen.append(found)
        assert [one.id for one in self.store.batches.unended()] == ([] if found.ended else [found.id])


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
