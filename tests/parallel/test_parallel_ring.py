"""The shared-memory ring: order, size, deadlines, and what happens when somebody dies."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.errors import ChannelClosed, ChannelError, ChannelTimeout
from parallel.launcher import launch
from parallel.message_ring import SharedMemoryRing
from parallel.shared_memory import NEWBORN, PREFIX, Segment, shared_folder
from tests.parallel import parallel_ring_targets

TIMEOUT = 10.0
SLOT = 128  # bytes, so that small messages are many pieces


def appeared(path: Path) -> str:
    """Return the text of a file that another process is about to write."""
    deadline = time.monotonic() + TIMEOUT
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.005)
    return path.read_text()


@settings(max_examples=30)
@given(
    st.lists(st.binary(max_size=SLOT * 6), min_size=1, max_size=12), st.integers(1, 3), st.sampled_from([0.0, 50e-6])
)
def test_every_reader_gets_every_message_whole_and_in_order(messages: list[bytes], readers: int, spin: float):
    with SharedMemoryRing.create(readers, slots=3, slot_bytes=SLOT, spin=spin) as driver:
        found: list[list[bytes]] = [[] for _ in range(readers)]

        def read(index: int) -> None:
            with SharedMemoryRing.attach(driver.name, index, spin=spin) as ring:
                found[index].extend(bytes(ring.receive(TIMEOUT)) for _ in messages)

        threads = [threading.Thread(target=read, args=(index,)) for index in range(readers)]
        for thread in threads:
            thread.start()
        for message in messages:
            driver.send(message, TIMEOUT)
        for thread in threads:
            thread.join(TIMEOUT)
    assert found == [messages] * readers


def test_a_message_is_valid_until_the_next_is_asked_for():
    with SharedMemoryRing.create(1, slots=2, slot_bytes=SLOT) as driver:
        worker = SharedMemoryRing.attach(driver.name, 0)
        driver.send(b"first", TIMEOUT)
        view = worker.receive(TIMEOUT)
        driver.send(b"other", TIMEOUT)
        with pytest.raises(ChannelTimeout):
            driver.send(b"third", 0.01)  # would overwrite the view
        assert view == b"first"
        assert worker.receive(TIMEOUT) == b"other"


def test_a_parked_reader_in_another_process_is_woken_at_once(tmp_path):
    rounds = 100
    with (
        SharedMemoryRing.create(1, spin=0.0) as there,
        launch(2, parallel_ring_targets.echo, (there.name, rounds, str(tmp_path / "back"))) as gang,
    ):
        back = SharedMemoryRing.attach(appeared(tmp_path / "back"), 0, spin=0.0)
        began = time.monotonic()
        for number in range(rounds):
            there.send(number.to_bytes(4, "little") * 1024, TIMEOUT)
            assert back.receive(TIMEOUT)[:4] == number.to_bytes(4, "little")
        # A single missed wake-up would cost a tick of 0.25 s; a hundred round trips cost a few milliseconds.
        assert time.monotonic() - began < 10.0
        assert gang.join(TIMEOUT)
        assert gang.exit_codes == (0,)


def test_a_silent_driver_and_a_slow_reader_miss_the_deadline():
    with SharedMemoryRing.create(2, slots=2, slot_bytes=SLOT) as driver:
        first = SharedMemoryRing.attach(driver.name, 0)
        with pytest.raises(ChannelTimeout, match="nothing came"):
            first.receive(0.01)
        driver.send(b"a", TIMEOUT)
        driver.send(b"b", TIMEOUT)
        for _ in range(2):
            first.receive(TIMEOUT)
        with pytest.raises(ChannelTimeout, match="nothing came"):
            first.receive(0.01)
        with pytest.raises(ChannelTimeout, match="rank 2 left no room for message 2"):
            driver.send(b"c", 0.01)


def test_closing_wakes_the_readers_after_they_have_read_everything():
    driver = SharedMemoryRing.create(1, slot_bytes=SLOT)
    worker = SharedMemoryRing.attach(driver.name, 0)
    driver.send(b"last", TIMEOUT)
    driver.close()
    driver.close()
    assert worker.receive(TIMEOUT) == b"last"
    with pytest.raises(ChannelClosed):
        worker.receive(TIMEOUT)


def test_closing_wakes_a_reader_that_waits_for_ever():
    driver = SharedMemoryRing.create(1, spin=0.0)
    worker = SharedMemoryRing.attach(driver.name, 0, spin=0.0)
    ended = threading.Event()

    def read() -> None:
        with pytest.raises(ChannelClosed):
            worker.receive(None)
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    driver.close()
    assert ended.wait(TIMEOUT)
    thread.join()


def test_a_killed_driver_is_noticed_and_leaves_no_segment(tmp_path):
    with launch(2, parallel_ring_targets.drive, (str(tmp_path / "name"),)) as gang:
        name = appeared(tmp_path / "name")
        worker = SharedMemoryRing.attach(name, 0)
        assert not Path(shared_folder(), name).exists()
        assert worker.receive(TIMEOUT) == b"first"
        gang.kill()
        began = time.monotonic()
        with pytest.raises(ChannelError, match="the driver is gone"):
            worker.receive(None)
        assert time.monotonic() - began < 5.0


def test_the_name_lives_only_until_all_have_attached_or_the_driver_closes():
    driver = SharedMemoryRing.create(2)
    SharedMemoryRing.attach(driver.name, 0)
    assert driver.path.exists()
    SharedMemoryRing.attach(driver.name, 1)
    assert not driver.path.exists()
    driver = SharedMemoryRing.create(1)
    driver.close()
    assert not driver.path.exists()
    driver = SharedMemoryRing.create(1)
    path = driver.path
    del driver
    assert not path.exists()


def test_the_segment_of_a_driver_that_was_killed_early_is_swept_up(tmp_path):
    with Segment.create(64) as live:
        dead = live.path.with_name(f"{PREFIX}orphan-{os.getpid()}")
        dead.write_bytes(b"x")
        for path in (dead, live.path):
            os.utime(path, (time.time() - 2 * NEWBORN,) * 2)
        with Segment.create(64):
            assert not dead.exists()
            assert live.path.exists()


def test_the_wrong_end_and_a_closed_end_are_refused():
    with SharedMemoryRing.create(1) as driver:
        worker = SharedMemoryRing.attach(driver.name, 0)
        with pytest.raises(ChannelError, match="only the driver"):
            worker.send(b"", TIMEOUT)
        with pytest.raises(ChannelError, match="only a worker"):
            driver.receive(TIMEOUT)
    with pytest.raises(ChannelError, match="only the driver's open end"):
        driver.send(b"", TIMEOUT)


def test_what_is_not_a_ring_or_not_its_reader_is_refused():
    with pytest.raises(ChannelError, match="is gone"):
        SharedMemoryRing.attach(f"{PREFIX}{'0' * 32}", 0)
    with Segment.create(4096) as segment, pytest.raises(ChannelError, match="not a message ring"):
        SharedMemoryRing.attach(segment.name, 0)
    with SharedMemoryRing.create(2) as driver, pytest.raises(ChannelError, match="reader must be 0 to 1, not 2"):
        SharedMemoryRing.attach(driver.name, 2)
    with pytest.raises(ValueError, match="not 1, 1 and 65536"):
        SharedMemoryRing.create(1, slots=1)


def test_more_memory_than_there_is_is_refused_and_leaves_nothing():
    with pytest.raises(ChannelError, match="no room for"):
        SharedMemoryRing.create(1, slots=2, slot_bytes=1 << 60)
