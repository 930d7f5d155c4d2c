import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.worker.forward import split_step
from tests.parity.test_attention import make_step

shapes = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30)), min_size=1, max_size=8)


def rows(step):
    """Everything a step says, token by token: (position, slot, table, first position of this part, wanted)."""
    found = []
    for i in range(step.num_reqs):
        start, end = step.query_start_loc[i], step.query_start_loc[i + 1]
        assert step.seq_lens[i] - step.num_computed_tokens[i] == end - start > 0
        for token in range(start, end):
            assert step.positions[token] == step.num_computed_tokens[i] + token - start
            table = step.block_tables[i].tolist()
            found.append((step.input_ids[token], step.positions[token], step.slot_mapping[token], table))
    return found


@given(shapes, st.integers(1, 60), st.data())
def test_parts_of_a_step_are_the_step(sizes, most, data):
    step = make_step([c for c, _ in sizes], [n for _, n in sizes])
    step.input_ids[:] = np.arange(step.num_tokens)
    wanted = data.draw(st.sets(st.integers(0, step.num_tokens - 1)))
    step.logits_indices = np.array(sorted(wanted), np.int32)
    parts = split_step(step, most)
    assert len(parts) == -(-step.num_tokens // most)
    assert all(part.num_tokens <= most for part in parts)
    assert [row for part in parts for row in rows(part)] == rows(step)
    chosen = np.concatenate([part.input_ids[part.logits_indices] for part in parts])
    assert chosen.tolist() == sorted(wanted)
    for part in parts:
        arrays = (part.query_start_loc, part.seq_lens, part.num_computed_tokens, part.logits_indices)
        assert all(array.dtype == np.int32 for array in arrays)


def test_blocks_are_copied_once_before_everything():
    step = make_step([3], [40])
    step.copy_blocks = np.array([[1, 2]], np.int32)
    assert [len(part.copy_blocks) for part in split_step(step, 15)] == [1, 0, 0]


def test_what_a_step_carries_goes_to_the_part_of_its_token():
    step = make_step([5, 0, 9, 7], [1, 40, 1, 1])
    step.input_ids[:] = np.arange(step.num_tokens)
    step.carried = np.array([[0, 3], [41, 0], [42, 1]], np.int32)
    parts = split_step(step, 15)
    carried = [[(int(part.input_ids[row]), sample) for row, sample in part.carried.tolist()] for part in parts]
    assert carried == [[(0, 3)], [], [(41, 0), (42, 1)]]
    assert {part.carried.dtype for part in parts} == {np.dtype(np.int32)}
