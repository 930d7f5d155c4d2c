"""What is kept of an answer, so that any router can give it to its client, or go on with it, to the same frames."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct, msgpack

from cluster.answer_log import AnswerLog, Kept
from cluster.errors import ApiError


class Head(Struct, frozen=True, array_like=True):
    """The request of an answer, and the rest that decides it.

    name: the id that the answer bears. path and body: what was asked. tenant: whose it is. asked: digest of what the
    client sent under its key, b"" without one. seed: of an answer whose client gave none; None = random. background:
    its client does not wait. born: random; which answer of this name it is, as one under a key may be deleted and
    made again. session: as `CallContext.session_id`. by_id: whether its client may fetch it by its name, and not by
    its key alone. needs_client: whether it is ended where nobody waits for it any more.
    """

    name: str
    path: str
    body: bytes
    tenant: str
    born: str
    asked: bytes = b""
    seed: int | None = None
    background: bool = False
    session: str = ""
    by_id: bool = True
    needs_client: bool = False


class End(Struct, frozen=True, array_like=True):
    """How an answer ended. at: seconds since 1970. code: of its error, "" = it is whole.

    status, retryable: of the error; 0 and None = those of its code.
    """

    at: int
    code: str = ""
    message: str = ""
    param: str | None = None
    status: int = 0
    retryable: bool | None = None

    def error(self) -> ApiError | None:
        """Return the error that ended it."""
        if not self.code:
            return None
        status = self.status or None
        return ApiError(self.code, self.message, param=self.param, status=status, retryable=self.retryable)


_encode = msgpack.Encoder().encode
_head = msgpack.Decoder(Head).decode
_end = msgpack.Decoder(End).decode


@dataclass(slots=True)
class Record:
    """All that is kept of one answer. notes: of its `AnswerLog`, in order. end: None while it runs.

    epoch: rises whenever another router goes on with it. owner: that made it, "" = this one. size: bytes that it
    takes. ended_at: on the event loop's clock, None = it is not known. deadline: on that clock, too; None = it takes
    as long as it takes. Used on one event loop.
    """

    head: Head
    notes: list[bytes] = field(default_factory=list)
    end: End | None = None
    epoch: int = 0
    size: int = 0
    owner: str = ""
    ended_at: float | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        self.size = len(self.head.body) + sum(map(len, self.notes))

    @property
    def version(self) -> tuple[int, str]:
        """Which log this is: notes are counted within one. The highest counts."""
        return self.epoch, self.owner

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error."""
        return self.end is not None and bool(self.end.code)

    def add(self, note: bytes) -> None:
        """Keep one more note."""
        self.notes.append(note)
        self.size += len(note)

    def log(self, kept: Kept) -> AnswerLog:
        """Return the log of an answer that goes on behind what is kept of it."""
        log = AnswerLog(self.notes) if self.notes else AnswerLog()
        log.kept = kept
        return log


def kept_of(head: Head) -> Kept:
    """Return how an answer is made, anew."""
    return Kept(head.name, head.seed, head.background)


def pack_head(head: Head) -> bytes:
    """Return a head as copies of it are sent."""
    return _encode(head)


def unpack_head(packed: bytes) -> Head:
    """Return the head that was sent; raises `msgspec.MsgspecError`."""
    return _head(packed)


def end_of(error: ApiError, at: float) -> End:
    """Return the end of an answer that ends with an error. at: seconds since 1970."""
    return End(int(at), error.code, error.message, error.param, error.status, error.retryable)


def pack_end(end: End | None) -> bytes:
    """Return an end as copies of it are sent; b"" while there is none."""
    return b"" if end is None else _encode(end)


def unpack_end(packed: bytes) -> End | None:
    """Return the end that was sent; raises `msgspec.MsgspecError`."""
    return _end(packed) if packed else None
