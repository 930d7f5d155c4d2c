"""What rules have on the device: the tokens that rows follow, and what was asked for when sequences were admitted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device.gpu import upload
from engine.report import NO_ROWS, Histories, Ints

T = TypeVar("T")

NO_TOKEN = -1
Columns = tuple[NDArray[Any], ...] | Ints | tuple[int, ...]  # ids alone, or several arrays of one length, ids first


class TokenLogs(NamedTuple):
    """The tokens of all rows of a step, those included that it computes, where their keys and values are.

    ids: [num_blocks, block_size] int32. tables: block tables, [some rows, width] int32. rows: that of each row of the
    step, on the host, [num_reqs].
    """

    ids: Tensor
    tables: Tensor
    rows: Ints

    def read(self, tables: Tensor, positions: Tensor) -> Tensor:
        """Return the tokens at some positions, int64. tables: row of each in the block tables. All [num] int64."""
        size = self.ids.shape[1]
        places = tables * self.tables.shape[1] + positions // size
        blocks = self.tables.reshape(-1).index_select(0, places).long()
        return self.ids.reshape(-1).index_select(0, blocks * size + positions % size).long()

    def last_of_output(self, histories: Histories) -> Tensor:
        """Return the last token of each sample's output, NO_TOKEN where that is empty. [num_samples] int64."""
        rows, lens, outputs = _placed(self, histories)
        return self.read(rows, lens - 1).masked_fill_(outputs == 0, NO_TOKEN)


def _placed(logs: TokenLogs, histories: Histories) -> list[Tensor]:
    """Return the rows of the block tables, the lengths and those of the outputs. [num_samples] int64 each."""
    arrays = (logs.rows[histories.rows], histories.lens, histories.lens - histories.starts)
    return upload([each.astype(np.int64) for each in arrays], logs.ids.device)


class DeviceRules:
    """What one step's rules find on the device. logs: None where no rule asks for tokens.

    Arrays of a sequence are sent there when it is first seen; joined, they are kept while a step has the same rows.
    """

    def __init__(self, logs: TokenLogs | None = None) -> None:
        self.logs = logs
        self._joined: dict[str, _Joined] = {}
        self._moved: dict[str, tuple[Mapping[int, Any], NDArray[np.int64], dict[int, Any]]] = {}

    def joined(self, name: str, by_row: Mapping[int, Columns], device: torch.device) -> list[Tensor]:
        """Return the rows and the columns of all rows' arrays, one row behind the other. name: of the rule."""
        kept = self._joined.get(name)
        if kept is None or kept.of is not by_row:
            kept = self._joined[name] = _Joined(by_row, {} if kept is None else kept.sent, device)
        return kept.columns

    def moved(self, name: str, by_row: Mapping[int, T], rows: NDArray[np.int64]) -> Mapping[int, T]:
        """Return what is asked for of `rows`, ascending, by their places among these; the same object as before."""
        of, at, found = self._moved.get(name, ({}, NO_ROWS, {}))
        if of is not by_row or not np.array_equal(at, rows):
            place = {row: at for at, row in enumerate(rows.tolist())}
            found = {place[row]: asked for row, asked in by_row.items()}
            self._moved[name] = (by_row, rows, found)
        return found


class _Joined:
    """Arrays of some rows, one behind the other on the device.

    sent: by their identity, those that are on the device already; afterwards those of these rows alone.
    """

    def __init__(
        self, by_row: Mapping[int, Columns], sent: Mapping[int, tuple[Columns, list[Tensor]]], device: torch.device
    ) -> None:
        self.of = by_row
        self.sent = {id(each): sent.get(id(each)) or (each, _send(each, device)) for each in by_row.values()}
        parts = [self.sent[id(each)][1] for each in by_row.values()]
        counts = np.array([len(part[0]) for part in parts], np.int64)
        (rows,) = upload([np.repeat(np.fromiter(by_row, np.int64, len(parts)), counts)], device)
        self.columns = [rows, *(torch.cat(column) for column in zip(*parts, strict=True))]


def _send(columns: Columns, device: torch.device) -> list[Tensor]:
    """Return ids, int64, and what lies beside them, on the device."""
    several = isinstance(columns, tuple) and isinstance(columns[0], np.ndarray)
    first, *others = columns if several else (np.asarray(columns),)
    return upload([np.asarray(first).astype(np.int64), *map(np.asarray, others)], device)


class Counted(NamedTuple):
    """Tokens of some rows' histories, one row behind the other.

    rows: which of the rows each is of; ids. output_rows, output_ids: those of the outputs alone. [num] int64 each.
    """

    rows: Tensor
    ids: Tensor
    output_rows: Tensor
    output_ids: Tensor


def read_histories(logs: TokenLogs, histories: Histories) -> Counted:
    """Return all tokens of prompts and outputs. Nothing here waits for the device, or is padded to the longest."""
    tables, lens, outputs = _placed(logs, histories)
    total, drawn = int(histories.lens.sum()), int((histories.lens - histories.starts).sum())
    rows, positions = _each(lens, total)
    ids = logs.read(tables.index_select(0, rows), positions)
    output_rows, numbers = _each(outputs, drawn)
    first = lens.cumsum(0) - outputs
    return Counted(rows, ids, output_rows, ids.index_select(0, first.index_select(0, output_rows) + numbers))


def _each(lens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return for each of `total` items its row, and its number in that. lens: items of each row."""
    rows = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens, output_size=total)
    return rows, torch.arange(total, device=lens.device) - (lens.cumsum(0) - lens).index_select(0, rows)
