"""What clients may send about files and batches.

Source: OpenAI API reference, "Files" and "Batch".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from cluster.batch.rows import URLS
from cluster.openai.field_types import Fields, Labels, note

MOST_FILES = 10_000
MOST_BATCHES, USUAL_BATCHES = 100, 20
FEWEST_SECONDS, MOST_SECONDS = 3600, 30 * 86_400  # that a file which expires is kept
_Content = Annotated[str, WithJsonSchema({"type": "string", "format": "binary"})]
BatchUrl = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]


def _seconds(value: Any) -> int:
    if type(value) is not int or not FEWEST_SECONDS <= value <= MOST_SECONDS:
        raise PydanticCustomError(
            "seconds", f"must be a whole number between {FEWEST_SECONDS} (an hour) and {MOST_SECONDS} (30 days)"
        )
    return value


class ExpiresAfter(Fields):
    """For how long a file is kept."""

    anchor: Literal["created_at"] = Field(description="created_at: counted from when the file is made")
    seconds: Annotated[
        int,
        BeforeValidator(_seconds),
        WithJsonSchema({"type": "integer", "minimum": FEWEST_SECONDS, "maximum": MOST_SECONDS}),
    ] = Field(description="3600 to 2592000")


class FileFields(Fields):
    """`POST /v1/files`, as multipart/form-data."""

    file: _Content = Field(
        description="the content, with a filename: JSON lines, each a request, of --max-file-bytes at most"
    )
    purpose: Literal["batch"] = Field(description="batch: the input of batches")
    expires_after: ExpiresAfter | None = note(
        "anchor created_at, and 3600 to 2592000 seconds, after which it is deleted; default: it is kept"
    )


class FileListFields(Fields):
    """The query of `GET /v1/files`."""

    after: str | None = note("the id of the last file of the page before")
    limit: int | None = note("1 to 10000 files; default 10000", 1, MOST_FILES)
    order: Literal["asc", "desc"] = note("by time of making: asc, the oldest first, or desc", default="desc")
    purpose: Literal["batch", "batch_output"] | None = note("only inputs (batch), or only outputs (batch_output)")


class BatchFields(Fields):
    """`POST /v1/batches`."""

    input_file_id: str = Field(description="a file that was uploaded with purpose batch")
    endpoint: BatchUrl = Field(description=f"of all its requests: {', '.join(URLS)}")
    completion_window: Literal["24h"] = Field(description="24h: what is not done by then is not done at all")
    metadata: Labels | None = note("at most 16 labels, kept with the batch")
    output_expires_after: ExpiresAfter | None = note("of its output and error file, as expires_after of a file")


class BatchListFields(Fields):
    """The query of `GET /v1/batches`, the newest first."""

    after: str | None = note("the id of the last batch of the page before")
    limit: int | None = note("1 to 100 batches; default 20", 1, MOST_BATCHES)


class NoFields(Fields):
    """`POST /v1/batches/ID/cancel`: nothing, or an empty object."""
