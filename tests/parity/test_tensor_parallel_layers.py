"""Sharded layers on two real ranks equal torch's own layers in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from parallel.group import Group
from tests.parallel.parallel_ranks import Crew, crew
from tests.parity import tensor_parallel_checks as checks


@pytest.fixture(scope="module")
def pair() -> Iterator[Crew]:
    with crew(2) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "check",
    [
        checks.column,
        checks.merged_column,
        checks.row,
        checks.row_packed,
        checks.qkv,
        checks.qkv_replicated,
        checks.qkv_fused_conv1d,
        checks.row_conv1d,
        checks.embedding_even,
        checks.embedding_uneven,
        checks.embedding_smaller_than_a_shard,
    ],
)
def test_two_ranks_equal_the_plain_layer(pair: Crew, check: Callable[[Group], None]) -> None:
    pair.run(check)
