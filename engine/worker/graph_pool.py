"""CUDA graphs of whole steps, one for each padded size: captured, chosen, replayed, dropped.

What is captured reads its inputs from memory that stays where it is and is filled anew before each replay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch

from engine.worker.graph_sizes import GraphSizes, least

logger = logging.getLogger(__name__)

PATIENCE = 256  # steps that go by in a larger size than need be, before the one that fits best is captured


class CaptureError(Exception):
    """A piece of work could not be recorded; it can still be run."""


class GraphDevice(Protocol):
    """What can record work and run it again. Used by one thread."""

    def capture(self, work: Callable[[], None]) -> Any:
        """Run `work` once, then record it; return what `replay` takes. Raises `CaptureError`, or what `work` raises.

        Recorded work must neither wait for the device nor copy from memory of the host that is not pinned.
        """

    def replay(self, graph: Any) -> None:
        """Run what was recorded, after all that was asked of the device before."""

    @property
    def bytes_taken(self) -> int:
        """Device memory that the recordings since the last `reset` have taken."""

    def reset(self) -> None:
        """Let go of the memory that all recordings share; none of them is replayed any more."""


class GraphPool:
    """Runs steps of one kind by replaying graphs; all ranks of a group choose alike, as they go by the steps alone.

    The largest size is captured before all others: they share one pool of memory, which it sizes.
    """

    def __init__(
        self,
        device: GraphDevice,
        sizes: GraphSizes,
        blank: Callable[[int], None],
        decode: Callable[[int], None],
        patience: int = PATIENCE,
        what: str = "decode steps of %d sequences",
    ) -> None:
        """blank: fills the inputs of a size with padding. decode: the work, from inputs to logits.

        what: says of a size what it is of.
        """
        self.sizes = sizes
        self._device = device
        self._blank = blank
        self._decode = decode
        self._patience = patience
        self.what = what
        self._graphs: dict[int, Any] = {}  # None where capturing failed
        self._ready: tuple[int, ...] = ()  # the keys, ascending
        self.failures: dict[int, str] = {}  # why a size has no graph, by size
        self._missed: dict[int, int] = {}

    @property
    def bytes_taken(self) -> int:
        """Device memory of the graphs."""
        return self._device.bytes_taken

    @property
    def captured(self) -> tuple[int, ...]:
        """Sizes that are replayed, ascending."""
        return tuple(size for size in self._ready if self._graphs[size] is not None)

    def capture_at_start(self) -> None:
        """Capture what a start waits for, the largest first."""
        for size in reversed(self.sizes.at_start):
            self._capture(size)

    def estimate(self) -> int:
        """Return about how many bytes the graphs of all sizes take; afterwards there are none.

        The largest one sizes the pool, and each of the others is taken to need as much as the second.
        """
        first, second = 0, 0
        if self.sizes.sizes:
            self._capture(self.sizes.largest)
            first = self.bytes_taken
        if len(self.sizes.sizes) > 1:
            self._capture(self.sizes.sizes[-2])
            second = self.bytes_taken - first
        self.clear()
        return first + max(len(self.sizes.sizes) - 1, 0) * second

    def choose(self, rows: int) -> int | None:
        """Return the size that a decode step of so many sequences takes, None where it is run as it is.

        Call before the step's inputs are filled in: what is missing may be captured now, which blanks them.
        """
        best = self.sizes.fit(rows)
        if best is None or best in self._graphs:
            return best
        # A start's sizes need no patience: after a sleep, steps are padded, and so rounded, as they were before it.
        ready = least(tuple(sorted({*self._ready, *self.sizes.at_start})), rows)
        self._missed[best] = missed = self._missed.get(best, 0) + 1
        chosen = best if ready is None or missed >= self._patience else ready
        self._capture(chosen)
        return chosen

    def run(self, size: int) -> None:
        """Compute a step whose inputs are filled in; `size` is from `choose`."""
        graph = self._graphs[size]
        if graph is None:
            self._decode(size)
        else:
            self._device.replay(graph)

    def clear(self) -> None:
        """Drop all graphs: what they read or write is to move. Those that are needed are captured again."""
        self._graphs.clear()
        self._missed.clear()
        self.failures.clear()
        self._ready = ()
        self._device.reset()

    def _capture(self, size: int) -> None:
        if size in self._graphs:
            return
        if size != self.sizes.largest:
            self._capture(self.sizes.largest)
        self._blank(size)
        try:
            self._graphs[size] = self._device.capture(partial(self._decode, size))
        except CaptureError as error:
            logger.warning(f"{self.what} run without a CUDA graph: %s", size, error)
            self.failures[size] = str(error)
            self._graphs[size] = None
        self._ready = tuple(sorted(self._graphs))


class CudaGraphDevice:
    """Records on a stream of its own, into one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._taken = 0

    @property
    def bytes_taken(self) -> int:
        """Device memory that the recordings since the last `reset` have taken."""
        return self._taken

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """See `GraphDevice`. The first run makes what kernels make at their first call, outside of the recording."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()
            torch.cuda.synchronize(self._device)
            free = torch.cuda.mem_get_info(self._device)[0]
            graph = self._record(work)
        finally:
            # What was queued reads the inputs of steps, also where it failed half-way.
            current.wait_stream(self._stream)
        self._taken += max(free - torch.cuda.mem_get_info(self._device)[0], 0)
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """See `GraphDevice`."""
        graph.replay()

    def reset(self) -> None:
        """See `GraphDevice`."""
        self._pool = torch.cuda.graph_pool_handle()
        self._taken = 0

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        try:
            return self._recorded(work)
        except RuntimeError as error:
            raise CaptureError((str(error) or type(error).__name__).splitlines()[0]) from error

    def _recorded(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            try:
                # Other threads may copy or allocate meanwhile; only what this one does must be fit to be recorded.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                work()
            except BaseException:
                # What went wrong says more than what it did to the recording.
                with suppress(RuntimeError):
                    self._end(graph)
                raise
            self._end(graph)
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording. Where CUDA cannot end one, torch's allocators do not hear of it and take it to go on.

        What two streams used, as results are, would never be free again, and nothing else be recorded into the pool.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            allocator: Any = torch._C
            device, pool = torch.cuda.current_device(), self._pool
            self._pool = torch.cuda.graph_pool_handle()
            with suppress(RuntimeError):  # where the end failed later, the allocator knows of it
                allocator._cuda_endAllocateToPool(device, pool)
                allocator._cuda_releasePool(device, pool)
            raise
