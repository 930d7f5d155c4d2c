"""All that a router (up) and a replica (down) may say, and its frames: a tagged msgpack array per message."""

from __future__ import annotations

import msgspec

from cluster.wire.answer_messages import (
    Deleted,
    Disclaim,
    Fetch,
    Fetched,
    Followed,
    Forget,
    Keep,
    Orphaned,
    Superseded,
)
from cluster.wire.parts import MAX_COUNT
from cluster.wire.replica_messages import Begun, Draining, Explained, Heartbeat, Rejected, Report, Welcome
from cluster.wire.router_messages import Abort, Explain, FinishChoice, Hello, Ping, Resync, Submit
from engine.errors import SquadronError

Up = Hello | Submit | Abort | FinishChoice | Ping | Resync | Explain | Keep | Fetch | Forget | Disclaim | Deleted
Down = (
    Welcome
    | Report
    | Rejected
    | Heartbeat
    | Draining
    | Explained
    | Begun
    | Fetched
    | Orphaned
    | Superseded
    | Followed
    | Deleted
)
Message = Up | Down

# How msgpack begins an array of so many elements (here: bytes of its header), and unsigned integers.
_ARRAY_HEADERS = dict.fromkeys(range(145, 160), 1) | {0xDC: 3, 0xDD: 5}
_FIXINT = 0x7F
_UINT_BYTES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_SUBMIT = b"\x02"

_ENCODER = msgspec.msgpack.Encoder()
_UP: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)
_DOWN: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)


class DamagedMessageError(SquadronError):
    """Bytes on a link that are no message of the protocol: the link must be closed."""


class DamagedSubmitError(DamagedMessageError):
    """A `Submit` that cannot be read, but for its stream key: that request must be refused, and the link goes on."""

    def __init__(self, message: str, stream: int) -> None:
        super().__init__(message)
        self.stream = stream


def encode(message: Message) -> bytes:
    """Return the message as one frame."""
    return _ENCODER.encode(message)


def decode_up(frame: bytes) -> Up:
    """Return the message that a router sent. Raises `DamagedMessageError` or, of a submit, `DamagedSubmitError`."""
    try:
        return _UP.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason, stream = f"damaged message from a router: {error}", _stream_of_submit(frame)
        if stream is not None:
            raise DamagedSubmitError(reason, stream) from error
        raise DamagedMessageError(reason) from error


def _stream_of_submit(frame: bytes) -> int | None:
    """Return the stream key of what begins as a submit does, None of anything else.

    By hand: what follows may be nested too deep for any reader, or end too soon.
    """
    array = _ARRAY_HEADERS.get(frame[0]) if frame else None
    if array is None or frame[array : array + 1] != _SUBMIT:
        return None
    key = frame[array + 1 :]
    if key and key[0] <= _FIXINT:
        return key[0]
    size = _UINT_BYTES.get(key[0]) if key else None
    if size is None or len(key) <= size:
        return None
    stream = int.from_bytes(key[1 : 1 + size], "big")
    return stream if stream <= MAX_COUNT else None


def decode_down(frame: bytes) -> Down:
    """Return the message that a replica sent. Raises `DamagedMessageError`."""
    try:
        return _DOWN.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DamagedMessageError(f"damaged message from a replica: {error}") from error
