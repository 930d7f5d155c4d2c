"""Tensors read by byte ranges are those of the safetensors library, whatever slice, dtype or place in the file."""

from __future__ import annotations

import json
import struct
from contextlib import nullcontext

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from engine.errors import CheckpointError
from engine.loader import weight_reader
from engine.loader.safetensors_file import DTYPES, Checkpoint, SafetensorsFile
from engine.loader.weight_reader import chunks_of, fill
from parallel.parameter import ShardedParameter, Transfer
from parallel.sharding import even_pieces

CPU = torch.device("cpu")
DTYPES_WRITTEN = [dtype for dtype in DTYPES.values() if dtype is not torch.float8_e8m0fnu]
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def bits(tensor):
    """The tensor's bytes, so that NaNs compare too; and its shape."""
    return tensor.contiguous().view(-1).view(torch.uint8).tolist(), tuple(tensor.shape), tensor.dtype


def made(shape, dtype, seed):
    size = torch.Size(shape).numel() * dtype.itemsize
    noise = torch.randint(
        0, 2 if dtype is torch.bool else 256, (size,), generator=torch.Generator().manual_seed(seed)
    )
    return noise.to(torch.uint8).view(dtype).view(shape)


@st.composite
def slices(draw, shape):
    def one(length):
        begin = draw(st.integers(0, length))
        return draw(st.sampled_from([slice(None), slice(begin, draw(st.integers(begin, length)))]))

    return tuple(one(length) for length in shape[: draw(st.integers(1, len(shape)))])


def odd_file(path, name, tensor):
    """A safetensors file whose tensor lies at an odd address: another one of 3 bytes comes first, and no padding."""
    size = tensor.numel() * tensor.dtype.itemsize
    code = next(code for code, dtype in DTYPES.items() if dtype is tensor.dtype)
    first = {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}
    header = {"a": first, name: {"dtype": code, "shape": list(tensor.shape), "data_offsets": [3, 3 + size]}}
    text = json.dumps(header).encode()
    text += b" " * (len(text) % 2)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"abc" + bytes(bits(tensor)[0]))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from(DTYPES_WRITTEN), odd=st.booleans())
def test_a_slice_is_what_the_safetensors_library_reads(tmp_path, data, shape, dtype, odd):
    tensor = made(shape, dtype, 1)
    path = tmp_path / "model.safetensors"
    if odd:
        odd_file(path, "x", tensor)
    else:
        save_file({"b": torch.ones(5), "x": tensor, "y": torch.ones(3)}, path)
    index = data.draw(slices(shape)) if shape else slice(None)
    file = SafetensorsFile(path)
    source = file.tensor("x")
    found = source[index]
    file.close()
    assert tuple(source.get_shape()) == shape
    if odd:
        assert bits(found) == bits(tensor[index] if shape else tensor)
    else:
        with safe_open(path, "pt") as theirs:
            expected = theirs.get_slice("x")[index] if shape else theirs.get_tensor("x")
        assert bits(found) == bits(expected)


@given(
    data=st.data(),
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple),
    limit=st.integers(1, 200),
    transposed=st.booleans(),
)
def test_chunks_cover_a_transfer_once_and_are_small(data, shape, limit, transposed):
    index = data.draw(slices(shape))
    selected = torch.empty(shape)[index].shape
    transposed = transposed and len(shape) == 2
    target = torch.zeros(tuple(reversed(selected)) if transposed else selected)
    place = target.t() if transposed else target
    source = SafetensorsFile.__new__(SafetensorsFile)
    disk = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    row_bytes = 4 * torch.Size(shape[1:]).numel()
    for chunk in chunks_of(_Memory(source, disk), Transfer(place, index), limit):
        assert 4 * torch.Size(chunk.shape).numel() <= max(limit, row_bytes)
        chunk.target.add_(chunk.source.rows(chunk))
    assert torch.equal(place, disk[index])


class _Memory:
    """A tensor in memory, cut like one on disk."""

    def __init__(self, file, tensor):
        self.file, self.tensor = file, tensor
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def rows(self, chunk):
        found = self.tensor.flatten()[chunk.element :][: torch.Size(chunk.shape).numel()].view(chunk.shape)
        return found[(slice(None), *chunk.inner)] if chunk.inner else found


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "up": torch.randn(12, 10),
        "down": torch.randn(6, 16),
        "fused": torch.randn(8, 24),
        "norm": torch.randn(7),
    }
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    opened = Checkpoint(tmp_path)
    yield opened
    opened.close()


def parameter(shape, axis, sizes, dtype=torch.bfloat16, rank=1, size=2):
    pieces = even_pieces(sizes, rank, size, "features")
    shape = list(shape)
    shape[axis] = sum(piece.size for piece in pieces)
    return ShardedParameter(torch.zeros(shape, dtype=dtype), axis, pieces)


def parameters(dtype):
    """Parameters and how they are loaded: rows, columns, rows of a transposed tensor in three parts, and whole."""
    return {
        "up": (parameter((12, 10), 0, [12], dtype), False),
        "down": (parameter((6, 16), 1, [16], dtype), False),
        "fused": (parameter((24, 8), 0, [12, 6, 6], dtype), True),
        "norm": (ShardedParameter(torch.zeros(7, dtype=dtype)), False),
    }


def check(checkpoint, read):
    for dtype in (torch.bfloat16, torch.float32):
        expected, found = parameters(dtype), parameters(dtype)
        for name, (one, transposed) in expected.items():
            one.load(checkpoint.source(name), None, transposed)
            assert one.loaded
        sources = {name: checkpoint.source(name) for name in found}
        reads = [
            (sources[name], transfer)
            for name, (one, transposed) in found.items()
            for transfer in one.transfers(sources[name], None, transposed)
        ]
        assert read(reads) == 2 * sum(one.numel() for one, _ in found.values())
        for name, (one, _) in found.items():
            assert torch.equal(one, expected[name][0])
            assert one.any()


@pytest.mark.parametrize("limit", [1, 64, 1 << 20])
def test_threads_fill_every_parameter_as_load_does(checkpoint, monkeypatch, limit):
    monkeypatch.setattr(weight_reader, "num_threads", lambda device, ranks: 3)
    monkeypatch.setattr(weight_reader.chunks_of, "__defaults__", (limit,))
    check(checkpoint, lambda reads: fill(reads, CPU))


def test_rows_that_are_wanted_whole_are_read_and_not_picked(tmp_path):
    save_file({"down": torch.ones(6, 16)}, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    whole, half = (parameter((6, 16), 1, [16], torch.float32, 0, size) for size in (1, 2))
    for one, inner in ((whole, ()), (half, (slice(0, 8),))):
        (transfer,) = one.transfers(file.tensor("down"))
        assert [chunk.inner for chunk in chunks_of(file.tensor("down"), transfer)] == [inner]


class FakeGpu:
    """What of torch.cuda a pinned buffer uses, on the host: copies take place at once."""

    def __init__(self, device=None):
        self.busy = False

    def synchronize(self):
        self.busy = False

    def record(self, stream):
        assert not self.busy, "a buffer was filled anew before it had been copied"
        self.busy = True

    def wait_stream(self, stream):
        pass


def test_pinned_buffers_bring_every_chunk(checkpoint, monkeypatch):
    empty, made = torch.empty, []

    def unpinned(*args, pin_memory=False, **more):
        if pin_memory:
            made.append(args)
        return empty(*args, **more)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Stream", FakeGpu)
    monkeypatch.setattr(torch.cuda, "Event", FakeGpu)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(weight_reader, "CHUNK_BYTES", 64)
    monkeypatch.setattr(weight_reader.chunks_of, "__defaults__", (64,))
    monkeypatch.setattr(weight_reader, "num_threads", lambda device, ranks: 2)
    check(checkpoint, lambda reads: fill(reads, torch.device("cuda:0")))
    assert made == [(64,)] * 8, "two buffers for each thread, twice"


def test_what_is_read_is_told_as_it_grows(checkpoint, monkeypatch):
    monkeypatch.setattr(weight_reader.chunks_of, "__defaults__", (64,))
    told = []
    check(checkpoint, lambda reads: fill(reads, CPU, told=told.append))
    parts = [told[: told.index(1.0) + 1], told[told.index(1.0) + 1 :]]
    for shares in filter(None, parts):
        assert shares == sorted(shares)
        assert 0 < shares[0] < shares[-1] == 1.0
    assert len(told) > 8


def test_a_file_that_shrinks_while_it_is_read_is_named(checkpoint):
    file = checkpoint.folder / "model.safetensors"
    source = checkpoint.source("up")
    with file.open("r+b") as opened:
        opened.truncate(source.start + 20)
    target = ShardedParameter(torch.zeros(12, 10, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor up cannot be read.*220 bytes too early"):
        fill([(source, transfer) for transfer in target.transfers(source)], CPU)


def test_a_dtype_that_is_not_known_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(2, dtype=torch.complex64)}, path)
    file = SafetensorsFile(path)
    with pytest.raises(CheckpointError, match="tensor x is of dtype C64, not BOOL"):
        file.tensor("x")


def test_the_ranks_of_a_gang_share_the_cores(monkeypatch):
    monkeypatch.setattr(weight_reader, "cores", lambda: 16)
    gpu = torch.device("cuda:0")
    assert [weight_reader.num_threads(gpu, ranks) for ranks in (1, 2, 8, 64)] == [16, 8, 2, 2]
    assert weight_reader.num_threads(CPU, 1) <= torch.get_num_threads()


def test_files_take_turns(tmp_path):
    for name in ("a", "b"):
        save_file({"x": torch.zeros(4), "y": torch.zeros(4)}, tmp_path / name)
    files = [SafetensorsFile(tmp_path / name) for name in ("a", "b")]
    chunks = []
    for file in files:
        for name in ("y", "x"):
            source = file.tensor(name)
            chunks += chunks_of(source, Transfer(torch.zeros(4), (slice(None),)))
    order = [(chunk.source.file.path.name, chunk.source.name) for chunk in weight_reader._by_turns(chunks)]
    assert order == [("a", "x"), ("b", "x"), ("a", "y"), ("b", "y")]
