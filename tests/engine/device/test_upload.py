import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.device.gpu import pack, packed_size, unpack, upload

arrays = st.lists(
    st.tuples(st.sampled_from([np.int64, np.int32, np.float32, np.bool_]), st.lists(st.integers(0, 5), max_size=2)),
    max_size=5,
)


@given(arrays)
def test_arrays_come_out_of_one_buffer_as_they_went_in(kinds):
    given_ = [(np.arange(np.prod(shape, dtype=int)) % 7).astype(kind).reshape(shape) for kind, shape in kinds]
    buffer = torch.zeros(packed_size(given_), dtype=torch.uint8)
    found = unpack(pack(given_, buffer), given_)
    for one, other in zip(found, given_, strict=True):
        np.testing.assert_array_equal(one.numpy(), other)
        assert one.numpy().dtype == other.dtype
        assert one.shape == other.shape


def test_parts_of_arrays_are_packed_without_their_gaps():
    whole = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    found = unpack(pack([whole], torch.zeros(packed_size([whole]), dtype=torch.uint8)), [whole])
    np.testing.assert_array_equal(found[0].numpy(), whole)


def test_on_a_cpu_nothing_is_copied():
    array = np.zeros(3, np.float32)
    (found,) = upload([array], torch.device("cpu"))
    array[1] = 5
    assert found[1] == 5
