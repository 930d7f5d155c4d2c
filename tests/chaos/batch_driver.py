"""`squadron` as tests start it: `batch_driver.py ROOM COUNTS ARGUMENT...`, with a disk that fills up, and a tally.

ROOM: bytes of the ledger until its disk is full, "" = it never is. COUNTS: a new file for what the replicas send to
the driver, which outlives a kill -9.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import sys
import types
from pathlib import Path

TALLY = struct.Struct("<qq")  # tokens of output; tokens of prompts and of answers that went on, which were prefilled


def fill_up(room: int) -> None:
    """Have the ledger's disk take `room` more bytes, the last write in part."""
    from cluster.batch.ledger import row_files

    def write(fd: int, data: bytes) -> int:
        nonlocal room
        written = os.write(fd, data[:room]) if room else 0
        room -= written
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written

    row_files.os = types.SimpleNamespace(**{**vars(os), "write": write})


def count_into(path: Path) -> None:
    """Keep the tally of what arrives in `path`, at every report of a replica."""
    from cluster.router.replica_handle import ReplicaHandle

    path.write_bytes(bytes(TALLY.size))
    with path.open("r+b") as file:
        tally = mmap.mmap(file.fileno(), TALLY.size)
    read, progressed = ReplicaHandle.read, ReplicaHandle.progressed

    def noted(method):
        def call(*arguments):
            result = method(*arguments)
            counters = arguments[-1]
            TALLY.pack_into(tally, 0, counters.tokens, counters.prefilled)
            return result

        return call

    ReplicaHandle.read, ReplicaHandle.progressed = noted(read), noted(progressed)


def main() -> None:
    """Run the command."""
    room, counts, *sys.argv[1:] = sys.argv[1:]
    if room:
        fill_up(int(room))
    if counts:
        count_into(Path(counts))
    from deploy.main import main as command

    command()


if __name__ == "__main__":
    main()
