"""The way to multiply that is fastest on this machine: measured once, and the same for all its processes."""

import fcntl
import time

import pytest
import torch
from typing_extensions import override

from engine.kernels import compiler, product_choice
from engine.kernels.product_choice import ProductChoice
from parallel.linear import LinearMethod

SLOW, FAST = 1.0, 0.1  # seconds


class Clock:
    """Stands still but for what products take."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def monotonic(self):
        return time.monotonic()

    def sleep(self, seconds):
        time.sleep(seconds)


CLOCK = Clock()


class Way(LinearMethod):
    """Takes `seconds` for each product of fewer than 100 rows, and `many` for others."""

    def __init__(self, seconds: float, many: float | None = None) -> None:
        self.seconds, self.many, self.products, self.weights = seconds, many or seconds, 0, []

    def of(self, weight):
        self.weights.append(weight)
        return self

    @override
    def apply(self, x, bias):
        self.products += 1
        CLOCK.now += self.seconds if len(x) < 100 else self.many
        return x


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(product_choice, "cache_folder", lambda name: tmp_path)
    monkeypatch.setattr(product_choice, "time", CLOCK)
    return tmp_path


def ask(weight, *ways, choice=None):
    named = {f"way {number}": way.of for number, way in enumerate(ways)}
    return (choice or ProductChoice(torch.float32)).fastest(weight, named)


WEIGHT = torch.ones(8, 4)


def test_the_fastest_is_taken():
    assert ask(WEIGHT, Way(SLOW), Way(FAST), Way(SLOW)) == "way 1"


def test_the_first_is_taken_where_all_are_about_as_fast():
    assert ask(WEIGHT, Way(1.05 * SLOW), Way(SLOW), Way(SLOW)) == "way 0"


def test_what_is_slow_for_many_rows_is_not_taken_because_it_is_fast_for_few():
    assert ask(WEIGHT, Way(SLOW, many=3 * SLOW), Way(1.4 * SLOW)) == "way 1"


def test_what_was_measured_once_is_known_to_other_processes():
    assert ask(WEIGHT, Way(SLOW), Way(FAST)) == "way 1"
    later = Way(FAST), Way(SLOW)
    assert ask(WEIGHT, *later) == "way 1"
    assert not later[0].products
    assert ask(torch.ones(8, 5), *later) == "way 0"  # another shape


def test_another_dtype_or_number_of_threads_is_measured_anew():
    ask(WEIGHT, Way(SLOW), Way(FAST))
    assert ask(WEIGHT, Way(FAST), Way(SLOW), choice=ProductChoice(torch.bfloat16)) == "way 0"
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert ask(WEIGHT, Way(FAST), Way(SLOW)) == "way 0"
    finally:
        torch.set_num_threads(threads)


def test_of_a_large_weight_a_part_is_measured():
    way = Way(FAST)
    ask(torch.empty(1 << 14, 1 << 10), way, Way(FAST))
    assert [tuple(weight.shape) for weight in way.weights] == [(1 << 11, 1 << 10)]


def test_a_way_that_cannot_multiply_by_the_weight_is_none():
    choice = ProductChoice(torch.float32)
    assert choice.fastest(WEIGHT, {"slow": Way(SLOW).of, "none": lambda weight: None}) == "slow"


def test_a_file_that_was_cut_short_is_written_anew(folder):
    ask(WEIGHT, Way(SLOW), Way(FAST))
    (file,) = folder.glob("*.json")
    file.write_bytes(file.read_bytes()[:9])
    assert ask(WEIGHT, Way(FAST), Way(SLOW)) == "way 0"
    assert ask(WEIGHT, Way(SLOW), Way(FAST)) == "way 0"


def test_without_a_folder_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(product_choice, "cache_folder", lambda name: None)
    ways = Way(SLOW), Way(FAST)
    assert ask(WEIGHT, *ways) == "way 0"
    assert not ways[0].products


def test_a_process_that_stands_still_while_it_measures_holds_nobody_up(folder, monkeypatch, caplog):
    ask(WEIGHT, Way(SLOW), Way(FAST))
    (lock,) = folder.glob("*.lock")
    monkeypatch.setattr(product_choice, "LOCK_TIMEOUT", 0.0)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert ask(torch.ones(8, 5), Way(SLOW), Way(FAST)) == "way 0"
    assert "held by another process" in caplog.text


def test_where_a_file_cannot_be_written_the_usual_way_is_taken(folder, monkeypatch, caplog):
    monkeypatch.setattr(product_choice, "cache_folder", lambda name: folder / "gone")
    assert ask(WEIGHT, Way(SLOW), Way(FAST)) == "way 0"
    assert "products are not measured" in caplog.text


def test_a_machine_taken_for_another_has_answers_of_its_own(folder, monkeypatch):
    for isa in (compiler.NATIVE, *compiler.isas()):
        monkeypatch.setenv(compiler.ISA_VARIABLE, isa)
        ask(WEIGHT, Way(SLOW), Way(FAST))
    assert len(list(folder.glob("*.json"))) == max(1, len(compiler.isas())), "native is one of them"
