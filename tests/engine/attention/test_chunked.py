import numpy as np
import pytest
import torch

from engine.attention.base import AttentionSpec
from engine.attention.chunked import ChunkLayout, in_chunks
from engine.attention.select import select_for_layers
from engine.errors import ConfigError


def ints(*values):
    return np.array(values, dtype=np.int32)


def test_rows_are_cut_where_chunks_begin():
    tables = np.arange(18, dtype=np.int32).reshape(3, 6)
    layout = ChunkLayout(ints(), ints(0, 11, 12, 12), ints(13, 8, 0), ints(2, 7, 0), tables)
    cut = in_chunks(layout, chunk=8, block_size=4)
    assert cut.query_start_loc.tolist() == [0, 6, 11, 12, 12]
    assert cut.seq_lens.tolist() == [8, 5, 8, 0]
    assert cut.num_computed_tokens.tolist() == [2, 0, 7, 0]
    assert cut.block_tables.tolist() == [[0, 1], [2, 3], [6, 7], [12, 13]]


def test_a_chunk_of_parts_of_blocks_is_refused_with_a_size_that_works():
    spec = AttentionSpec(4, 2, 16, 0.25, (0,), 0.0, 16, torch.float32, torch.device("cpu"), chunk=24)
    with pytest.raises(ConfigError, match=r"block_size=16: .* chunks of 24 tokens, .* use block_size=8"):
        select_for_layers("auto", [spec], [0])
