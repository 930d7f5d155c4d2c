"""Packed messages come back as they were, as views; damaged ones are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from parallel.channel import ALIGNMENT, DTYPES, ChannelMessage, pack, unpack
from parallel.errors import ChannelError

names = st.text(st.characters(categories=["L", "N"], include_characters="_"), min_size=1, max_size=12)
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6))
)
messages = st.builds(
    ChannelMessage,
    st.integers(0, 2**16 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.dictionaries(names, arrays, max_size=6),
)
EXAMPLE = ChannelMessage(1, 2, {"ids": np.arange(5, dtype=np.int32), "table": np.ones((2, 3), dtype=np.float32)})


@given(messages)
def test_what_is_packed_is_unpacked_in_order(message: ChannelMessage):
    found = unpack(pack(message))
    assert (found.kind, found.number) == (message.kind, message.number)
    assert list(found.arrays) == list(message.arrays)
    for name, array in message.arrays.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)


def test_unpacked_arrays_are_aligned_views_that_can_be_written():
    buffer = pack(EXAMPLE)
    table = unpack(buffer).arrays["table"]
    table[1, 2] = 7
    assert unpack(buffer).arrays["table"][1, 2] == 7
    assert np.shares_memory(table, np.frombuffer(buffer, np.uint8))
    assert (table.ctypes.data - np.frombuffer(buffer, np.uint8).ctypes.data) % ALIGNMENT == 0


def test_strided_arrays_are_packed_by_value():
    grid = np.arange(12, dtype=np.int64).reshape(3, 4)
    np.testing.assert_array_equal(unpack(pack(ChannelMessage(arrays={"t": grid.T[::2]}))).arrays["t"], grid.T[::2])


@given(st.integers(0, len(pack(EXAMPLE)) - 1))
def test_a_short_message_is_refused(length: int):
    with pytest.raises(ChannelError):
        unpack(pack(EXAMPLE)[:length])


@given(st.integers(0, 60), st.integers(1, 255))
def test_a_damaged_prefix_or_table_is_refused(position: int, flip: int):
    buffer = pack(EXAMPLE)
    buffer[position] ^= flip
    with pytest.raises(ChannelError):
        unpack(buffer)


def test_a_foreign_message_is_refused_naming_how_it_begins():
    with pytest.raises(ChannelError, match="it begins with b'HTTP/1"):
        unpack(b"HTTP/1.1 400 Bad Request, and so on and so forth")


@pytest.mark.parametrize(
    ("name", "array", "complaint"),
    [
        ("a", np.array(["x"]), "'a' has dtype <U1"),
        ("a", np.array([1j]), "'a' has dtype complex128"),
        ("a b", np.zeros(1), "'a b' has a comma or a space"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(name: str, array: np.ndarray, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        pack(ChannelMessage(arrays={name: array}))
