"""The form in which a file is uploaded, read as it comes: its fields are small, and its file goes to a draft.

python-multipart finds the parts; it has no limits for them, and reads no file into a store, so these stand here.
Source: RFC 7578 (multipart/form-data).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from cluster.batch.server.root import Draft
from cluster.errors import ApiError
from engine.errors import InvalidRequestError

FILE = "file"
MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16  # beside the file; all are checked again with each one more
MAX_FILENAME = 255  # characters
MAX_BOUNDARY = 70  # bytes, by RFC 2046
_ENCODINGS = (b"", b"binary", b"8bit", b"7bit")


def boundary_of(content_type: str) -> bytes:
    """Return the boundary between parts; raises `ApiError`: 415 for other types, 400 without a fit boundary."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        shown = kind.decode("latin-1")[:100]
        raise ApiError("unsupported_media_type", f"Content-Type must be multipart/form-data, not {shown!r}")
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= MAX_BOUNDARY:
        raise ApiError(
            "invalid_multipart", f"Content-Type must name a boundary of 1 to {MAX_BOUNDARY} bytes, as HTTP clients do"
        )
    return boundary


class UploadForm:
    """Takes the body of an upload block by block. Used by one thread at a time; ends with `discard`.

    new_draft: begins the file's content. check: told the fields so far whenever there is one more; raises for a wrong
    one. max_file_bytes: of the content. too_large: the error of one with more. All methods raise `ApiError`,
    `InvalidRequestError` and `OSError`.
    """

    def __init__(
        self,
        boundary: bytes,
        new_draft: Callable[[], Draft],
        check: Callable[[Mapping[str, str]], None],
        max_file_bytes: int,
        too_large: ApiError | None = None,
    ) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._new_draft = new_draft
        self._check = check
        self._max_file_bytes = max_file_bytes
        self._too_large = too_large or too_large_file(max_file_bytes)
        self._draft: Draft | None = None
        self._part = _Part()
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part,
                "on_header_field": lambda data, start, end: self._part.add_name(data[start:end]),
                "on_header_value": lambda data, start, end: self._part.add_value(data[start:end]),
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers,
                "on_part_data": lambda data, start, end: self._on_data(data[start:end]),
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    def feed(self, block: bytes) -> None:
        """Take the next part of the body."""
        try:
            self._parser.write(block)
        except FormParserError as error:
            raise ApiError("invalid_multipart", f"the body is not valid multipart/form-data: {error}") from None

    def finish(self) -> tuple[str, Draft]:
        """Return name and content of the file, at the end of the body."""
        if not self._ended:
            raise ApiError("invalid_multipart", "the body ends before its last boundary; send it whole")
        if self._draft is None or self.filename is None:
            raise InvalidRequestError("file is missing: send a part of this name", FILE, "missing_required_parameter")
        if not self._draft.size:
            raise InvalidRequestError("file is empty: send one line for each request", FILE)
        return self.filename, self._draft

    def discard(self) -> None:
        """Remove the draft, unless it was put in place. Can be called twice."""
        if self._draft is not None:
            self._draft.discard()

    def _on_part(self) -> None:
        self._part = _Part()

    def _on_header_end(self) -> None:
        self._part.end_header()

    def _on_headers(self) -> None:
        part = self._part
        part.begin()
        if part.name in self.fields or (part.name == FILE and self.filename is not None):
            raise InvalidRequestError(f"{part.name} is there twice; send it once", part.name)
        if len(self.fields) == MAX_FIELDS and part.name != FILE:
            raise ApiError("invalid_multipart", f"a form may have at most {MAX_FIELDS} parts beside its file")
        if part.name == FILE:
            self.filename = part.file_name()
            self._draft = self._new_draft()

    def _on_data(self, data: bytes) -> None:
        if self._part.name != FILE or self._draft is None:
            self._part.add(data)
            return
        if self._draft.size + len(data) > self._max_file_bytes:
            raise self._too_large
        self._draft.write(data)

    def _on_part_end(self) -> None:
        if self._part.name != FILE:
            self.fields[self._part.name] = self._part.text()
            self._check(self.fields)

    def _on_end(self) -> None:
        self._ended = True


class _Part:
    """One part of a form: what its headers say, and what it holds unless it is the file."""

    def __init__(self) -> None:
        self.name = ""
        self._filename: bytes | None = None
        self._headers: dict[bytes, bytes] = {}
        self._header_name = self._header_value = self._data = b""

    def add_name(self, data: bytes) -> None:
        self._header_name += data

    def add_value(self, data: bytes) -> None:
        self._header_value += data

    def end_header(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def begin(self) -> None:
        """All headers are there."""
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if kind != b"form-data" or not options.get(b"name"):
            raise ApiError("invalid_multipart", 'each part needs Content-Disposition: form-data; name="..."')
        self.name = _text(options[b"name"], "the name of a part")
        self._filename = options.get(b"filename")
        encoding = self._headers.get(b"content-transfer-encoding", b"").strip().lower()
        if encoding not in _ENCODINGS:
            raise ApiError("invalid_multipart", f"{self.name[:64]}: send the part without Content-Transfer-Encoding")

    def file_name(self) -> str:
        if self._filename is None:
            raise InvalidRequestError(
                'file must be a file: send its part with a filename, such as filename="requests.jsonl"', FILE
            )
        name = _text(self._filename, "filename")
        if not 0 < len(name) <= MAX_FILENAME or not name.isprintable():
            raise InvalidRequestError(f"file must have a filename of 1 to {MAX_FILENAME} printable characters", FILE)
        return name

    def add(self, data: bytes) -> None:
        if len(self._data) + len(data) > MAX_FIELD_BYTES:
            raise InvalidRequestError(f"{self.name[:64]} is longer than {MAX_FIELD_BYTES} bytes", self.name[:64])
        self._data += data

    def text(self) -> str:
        return _text(self._data, self.name[:64])


def too_large_file(limit: int) -> ApiError:
    """Return the error of a file that is too large."""
    message = f"the file is larger than {limit} bytes; the server's --max-file-bytes sets this"
    return ApiError("body_too_large", message, param=FILE)


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ApiError("invalid_multipart", f"{what} must be UTF-8") from None
