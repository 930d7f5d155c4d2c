"""Which cores a rank gets, shown on machines that are folders of files as the kernel writes them."""

from __future__ import annotations

import pytest

from engine.device.topology import Core, choose_cores, format_cpus, parse_cpus, read_cores
from tests.engine.device.machines import machine


def test_lists_are_read_and_written_as_the_kernel_does():
    assert parse_cpus("0-3,8\n") == (0, 1, 2, 3, 8)
    assert format_cpus({8, 0, 2, 1, 3}) == "0-3,8"
    assert format_cpus(()) == ""
    for wrong in ("", "a", "3-1", "-1", "0-", "0,,1", "0-99999999999"):
        with pytest.raises(ValueError):
            parse_cpus(wrong)


def test_a_core_has_its_hardware_threads_and_a_node(tmp_path):
    two_sockets = machine(tmp_path, sockets=2, cores=32, smt=2)
    found = read_cores(range(128), two_sockets)
    assert len(found) == 64
    assert found[0] == Core(0, (0, 64), 0)
    assert found[63] == Core(63, (63, 127), 1)
    assert read_cores({64, 5}, two_sockets) == [Core(0, (64,), 0), Core(5, (5,), 0)], "of those that it may use"


def test_where_nothing_is_told_each_cpu_is_a_core(tmp_path):
    assert read_cores({0, 3}, tmp_path / "nowhere") == [Core(0, (0,), 0), Core(3, (3,), 0)]


def test_older_kernels_call_siblings_by_another_name(tmp_path):
    old = machine(tmp_path, sockets=1, cores=2, smt=2, siblings="thread_siblings_list")
    assert [core.cpus for core in read_cores(range(4), old)] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("taken", "threads", "expected"),
    [
        ((), 8, "0-7"),
        (range(8), 8, "32-39"),  # the other node has more free cores
        ((*range(8), *range(32, 48)), 8, "8-15"),
        (range(40), 24, "40-63"),  # one thread a core: hardware threads of one core share its units
        ((), 64, "0-63"),  # more than a node has
        (range(4, 64), 8, "0-3,64-67"),  # both threads of each core, as there are no more cores
        (range(4, 64), 3, "0-2"),
        (range(62), 3, "62-63,126"),
        (range(4, 64), 9, None),
        (range(64), 1, None),
    ],
)
def test_ranks_get_cores_of_their_own_on_one_node_where_they_fit(tmp_path, taken, threads, expected):
    cores = read_cores(range(128), machine(tmp_path, sockets=2, cores=32, smt=2))
    chosen = choose_cores([core for core in cores if core.number not in taken], threads)
    found = None if chosen is None else format_cpus(cpu for core in chosen for cpu in core.cpus)
    assert found == expected
