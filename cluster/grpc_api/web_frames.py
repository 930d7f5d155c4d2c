"""gRPC as the body of an HTTP answer: messages, then the status, each behind five bytes.

Source: github.com/grpc/grpc, doc/PROTOCOL-WEB.md: a byte of flags (0x80 = trailers), four of length, the content.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote, unquote

import grpc

from cluster.grpc_api.rpc import TrailingMetadata

CONTENT_TYPE = b"application/grpc-web"
HEAD = 5
TRAILERS = 0x80
BINARY = "-bin"  # ends the names of metadata whose values are bytes
_STATUSES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class CallEnd:
    """How a call ended. trailing: metadata behind the last message."""

    code: grpc.StatusCode
    message: str = ""
    trailing: TrailingMetadata = ()


def message_frame(message: bytes) -> bytes:
    """Return one message as it stands in the body."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def end_frame(end: CallEnd) -> bytes:
    """Return the last frame of the body."""
    lines = [f"grpc-status: {end.code.value[0]}", f"grpc-message: {quote(end.message)}"]
    for name, value in end.trailing:
        text = b64encode(value).decode() if isinstance(value, bytes) else quote(value)
        lines.append(f"{name}: {text}")
    block = "".join(f"{line}\r\n" for line in lines).encode()
    return bytes([TRAILERS]) + len(block).to_bytes(4, "big") + block


class FrameReader:
    """Cuts a body, as it comes in pieces, into its frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def take(self, piece: bytes) -> Iterator[bytes | CallEnd]:
        """Yield the messages that are complete with this piece, and the end when it is."""
        self._rest += piece
        while len(self._rest) >= HEAD:
            whole = HEAD + int.from_bytes(self._rest[1:HEAD], "big")
            if len(self._rest) < whole:
                return
            flags, content = self._rest[0], bytes(self._rest[HEAD:whole])
            del self._rest[:whole]
            yield _end_of(content) if flags & TRAILERS else content


def _end_of(block: bytes) -> CallEnd:
    pairs = [line.partition(": ")[::2] for line in block.decode().splitlines()]
    given = dict(pairs)
    trailing = [
        (name, b64decode(text) if name.endswith(BINARY) else unquote(text))
        for name, text in pairs
        if name not in {"grpc-status", "grpc-message"}
    ]
    return CallEnd(_STATUSES[int(given["grpc-status"])], unquote(given["grpc-message"]), tuple(trailing))
