"""Weights that go to a GPU through pinned buffers are those of the file; the host holds a few buffers of them."""

from __future__ import annotations

import json
import resource
import time

import pytest
import torch
from safetensors.torch import save_file

from engine.loader import weight_reader
from engine.loader.safetensors_file import Checkpoint
from engine.loader.weight_reader import CHUNK_BYTES, fill, num_threads
from parallel.parameter import ShardedParameter
from parallel.sharding import even_pieces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
# Rows of one piece, rows and columns of one rank of two, a transposed tensor in three parts, and a whole one.
SHAPES = {"up": (1001, 640), "down": (512, 2002), "fused": (96, 1536), "norm": (2048,), "table": (9000, 640)}


def parameter(shape, axis, sizes, rank, dtype):
    pieces = even_pieces(sizes, rank, 2, "features")
    shape = list(shape)
    shape[axis] = sum(piece.size for piece in pieces)
    return ShardedParameter(torch.zeros(shape, dtype=dtype, device="cuda"), axis, pieces)


def parameters(rank, dtype):
    return {
        "down": (parameter((512, 2002), 1, [2002], rank, dtype), False),
        "fused": (parameter((1536, 96), 0, [768, 384, 384], rank, dtype), True),
        "table": (parameter((9000, 640), 0, [9000], rank, dtype), False),
        "up": (ShardedParameter(torch.zeros(1001, 640, dtype=dtype, device="cuda")), False),
        "norm": (ShardedParameter(torch.zeros(2048, dtype=dtype, device="cuda")), False),
    }


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    save_file({name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}, tmp_path / "model.safetensors")
    opened = Checkpoint(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("chunk", [4096, CHUNK_BYTES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_element_arrives_cast_on_the_device(checkpoint, monkeypatch, chunk, dtype, rank):
    monkeypatch.setattr(weight_reader, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(weight_reader.chunks_of, "__defaults__", (chunk,))
    found = parameters(rank, dtype)
    sources = {name: checkpoint.source(name) for name in found}
    reads = [
        (sources[name], transfer)
        for name, (one, transposed) in found.items()
        for transfer in one.transfers(sources[name], None, transposed)
    ]
    fill(reads, torch.device("cuda:0"))
    for name, (one, transposed) in parameters(rank, dtype).items():
        one.load(sources[name], None, transposed)
        assert torch.equal(one, found[name][0]), name


def test_a_large_tensor_takes_no_more_of_the_host_than_the_buffers(tmp_path):
    rows = 2_000_000
    with (tmp_path / "model.safetensors").open("wb") as file:  # 2 GB of zeros that were never in memory
        header = {"table": {"dtype": "BF16", "shape": [rows, 512], "data_offsets": [0, rows * 1024]}}
        text = json.dumps(header).encode()
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + rows * 1024)
    opened = Checkpoint(tmp_path)
    target = ShardedParameter(torch.ones(rows, 512, dtype=torch.bfloat16, device="cuda"))
    source, device = opened.source("table"), torch.device("cuda:0")
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    num_bytes = fill([(source, transfer) for transfer in target.transfers(source)], device)
    seconds = time.perf_counter() - began
    opened.close()
    print(f"{num_bytes / 1e9 / seconds:.1f} GB/s, the first pinned buffers included")
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert num_bytes == target.nbytes
    assert not bool(target.any())
    assert grown < 2 * num_threads(device, 1) * CHUNK_BYTES + (256 << 20)
