"""Fills parameters from files by several threads; on a GPU one pinned buffer is copied while others are filled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from engine.device.machine import cores
from engine.loader.safetensors_file import TensorOnDisk
from parallel.parameter import Transfer

CHUNK_BYTES = 8 << 20  # read at a time; two buffers of it per thread are all the memory that reading takes
MOST_THREADS = 16
Told = Callable[[float], None]  # called with the share of a whole that is done, 0 to 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of bytes in a file, and the place for what is wanted of it.

    element: number of the tensor's first element that is read. shape: of what is read, in C order. inner: what is
    wanted of it along the axes after the first, () = everything. target: shaped like what is wanted.
    """

    source: TensorOnDisk
    element: int
    shape: tuple[int, ...]
    inner: tuple[slice, ...]
    target: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes that are wanted."""
        return self.target.numel() * self.source.dtype.itemsize

    def read_into(self, place: Tensor) -> None:
        """Fill `place`, on the host, shaped like the target, of the dtype on disk, and contiguous unless `inner`."""
        if self.inner:
            self.source.pick_into(self.element, self.shape, self.inner, place)
        else:
            self.source.read_into(self.element, place)


def chunks_of(source: TensorOnDisk, transfer: Transfer, limit: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Cut a transfer into chunks of at most `limit` bytes each, or of one row where a row has more."""
    first, inner = transfer.index[0], transfer.index[1:]
    if all(part.indices(length) == (0, length, 1) for part, length in zip(inner, source.shape[1:], strict=False)):
        inner = ()
    size = source.dtype.itemsize
    if not source.shape:
        yield Chunk(source, 0, (), (), transfer.target)
        return
    begin, stop, _ = first.indices(source.shape[0])
    width, row_shape, target = math.prod(source.shape[1:]), source.shape[1:], transfer.target
    if not inner and target.is_contiguous():  # rows may then be cut anywhere
        begin, stop, width, row_shape, target = begin * width, stop * width, 1, (), target.view(-1)
    rows = max(1, limit // max(1, width * size))
    for row in range(begin, stop, rows):
        count = min(rows, stop - row)
        place = target.narrow(0, row - begin, count)
        yield Chunk(source, row * width, (count, *row_shape), inner, place)


def fill(
    reads: Sequence[tuple[TensorOnDisk, Transfer]],
    device: torch.device,
    ranks: int = 1,
    told: Told = lambda _: None,
) -> int:
    """Make all transfers, to parameters on `device`, cast to their dtypes; returns the bytes read.

    Which thread reads what makes no difference to the result. ranks: of the group, which share the machine's cores.
    told: called with the share of the bytes that are read, 0 to 1, as it grows.

    Raises `CheckpointError` naming file and tensor for the first one that cannot be read.
    """
    chunks = [chunk for source, transfer in reads for chunk in chunks_of(source, transfer)]
    copy = _to_gpu(chunks, device, ranks) if device.type == "cuda" else _in_memory
    with ThreadPoolExecutor(num_threads(device, ranks), thread_name_prefix="weights") as threads:
        running = [(threads.submit(copy, chunk), chunk) for chunk in _by_turns(chunks)]
        read, whole = 0, sum(chunk.num_bytes for chunk in chunks)
        try:
            for each, chunk in running:
                each.result()
                read += chunk.num_bytes
                told(read / max(whole, 1))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return whole


def num_threads(device: torch.device, ranks: int) -> int:
    """Return how many threads read: on a CPU those that compute; a GPU's only copy, so they take all cores."""
    if device.type == "cpu":
        return min(MOST_THREADS, torch.get_num_threads())
    return max(2, min(MOST_THREADS, cores() // ranks))


def _by_turns(chunks: Sequence[Chunk]) -> Iterator[Chunk]:
    """Yield the chunks of each file in the order of the file, the files taking turns: all disks are busy at once."""
    files: dict[object, list[Chunk]] = {}
    for chunk in chunks:
        files.setdefault(chunk.source.file, []).append(chunk)
    queues = [sorted(each, key=_place) for each in files.values()]
    for turn in range(max(map(len, queues), default=0)):
        yield from (queue[turn] for queue in queues if turn < len(queue))


def _place(chunk: Chunk) -> int:
    return chunk.source.start + chunk.element * chunk.source.dtype.itemsize


@torch.no_grad()
def _in_memory(chunk: Chunk) -> None:
    """Read straight into a parameter on the host, or by way of a buffer where dtype or layout differ."""
    target = chunk.target
    if target.dtype is chunk.source.dtype and (chunk.inner or target.is_contiguous()):
        chunk.read_into(target)
    else:
        found = torch.empty(target.shape, dtype=chunk.source.dtype)
        chunk.read_into(found)
        target.copy_(found)


def _to_gpu(chunks: Sequence[Chunk], device: torch.device, ranks: int) -> Callable[[Chunk], None]:
    """Return what brings one chunk to the GPU, by any thread, through a ring of pinned buffers."""
    largest = max((chunk.num_bytes for chunk in chunks), default=0)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # the parameters' zeros come before what is read
    ring: SimpleQueue[PinnedBuffer] = SimpleQueue()
    for _ in range(2 * num_threads(device, ranks)):
        ring.put(PinnedBuffer(max(CHUNK_BYTES, largest), stream))

    def copy(chunk: Chunk) -> None:
        buffer = ring.get()
        try:
            buffer.carry(chunk)
        finally:
            ring.put(buffer)

    return copy


class PinnedBuffer:
    """Page-locked memory that is filled from a file, then copied to the GPU while others are filled."""

    def __init__(self, num_bytes: int, stream: torch.cuda.Stream) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._stream = stream
        self._copied = torch.cuda.Event()

    @torch.no_grad()
    def carry(self, chunk: Chunk) -> None:
        """Read a chunk, once the last one has left the buffer, and begin to copy it; a cast is the GPU's work."""
        self._copied.synchronize()
        target = chunk.target
        staged = self._memory[: chunk.num_bytes].view(chunk.source.dtype).view(target.shape)
        chunk.read_into(staged)
        with torch.cuda.stream(self._stream):
            if staged.dtype is target.dtype and target.is_contiguous():
                target.copy_(staged, non_blocking=True)
            else:  # in one step the host would cast or reorder it
                target.copy_(staged.to(target.device, non_blocking=True))
            self._copied.record(self._stream)
