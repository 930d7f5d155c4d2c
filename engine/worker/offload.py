"""The weights of a sleeping model: copied to the host's pinned memory, freed on the device, and brought back.

Also what a model keeps on its device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallel.linear import LinearMethod

# Torch rounds what it pins up to a power of two: pieces of that size waste at most one of them.
PIECE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a storage, and the piece of host memory that holds them."""

    start: int
    piece: Tensor


class OffloadedWeights:
    """Copies of tensors in the host's pinned memory, which is taken once and kept for the next time.

    Their memory is given back under them: the tensors, and all that share storage with them, stay what they are, are
    empty while offloaded, and may lie at other addresses afterwards.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._pieces: list[Tensor] = []
        self._offloaded: list[tuple[torch.UntypedStorage, int]] = []  # storages and their bytes

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Copy the tensors to the host and free their memory; returns the bytes. No step may be running.

        Memory that is not torch's to free (arrays of numpy share it) stays where it is. Raises `MemoryError`, with
        everything as it was, where the host has no room.
        """
        found = (tensor.untyped_storage() for tensor in tensors)
        storages = {each._cdata: each for each in found if each.nbytes() and each.resizable()}
        self._take_pieces(sum(storage.nbytes() for storage in storages.values()))
        self._offloaded = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, span in self._spans():
            span.piece.copy_(_bytes(storage, span), non_blocking=True)
        _finish(storages.values())
        for storage, _ in self._offloaded:
            storage.resize_(0)
        return sum(size for _, size in self._offloaded)

    def restore(self) -> None:
        """Bring everything back. Where there is no memory all stays offloaded, and torch's error is raised."""
        try:
            for storage, size in self._offloaded:
                storage.resize_(size)
        except BaseException:
            for storage, _ in self._offloaded:
                storage.resize_(0)
            raise
        for storage, span in self._spans():
            _bytes(storage, span).copy_(span.piece, non_blocking=True)
        _finish(storage for storage, _ in self._offloaded)
        self._offloaded = []

    def _take_pieces(self, total: int) -> None:
        try:
            while len(self._pieces) * PIECE_BYTES < total:
                self._pieces.append(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._pinned))
        except RuntimeError as error:
            self._pieces.clear()
            raise MemoryError(f"{total / 1e9:.1f} GB of the host's memory for the weights: {error}") from error

    def _spans(self) -> Iterator[tuple[torch.UntypedStorage, Span]]:
        """Yield where each byte of each storage has its place; one storage after another fills the pieces."""
        used = 0
        for storage, size in self._offloaded:
            start = 0
            while start < size:
                number, inside = divmod(used, PIECE_BYTES)
                count = min(size - start, PIECE_BYTES - inside)
                yield storage, Span(start, self._pieces[number][inside : inside + count])
                start += count
                used += count


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield what the modules of a loaded model keep: parameters, buffers, other tensors, those of linear methods."""
    for module in model.modules():
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        for value in vars(module).values():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, LinearMethod):
                yield from value.tensors()


def _bytes(storage: torch.UntypedStorage, span: Span) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole[span.start : span.start + len(span.piece)]


def _finish(storages: Iterable[torch.UntypedStorage]) -> None:
    for device in {storage.device for storage in storages}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
