"""What clients may send about files and batches.

Source: OpenAI API reference, "Files" and "Batch".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from cluster.batch.rows import URLS
from cluster.openai.field_types import Fields, Labels, note
from cluster.openai.refusals import Refusal

MOST_FILES = 10_000
MOST_BATCHES, USUAL_BATCHES = 100, 20
_KEPT = Refusal((), "leave it out: files are kept until they are deleted (DELETE /v1/files/ID)")
REFUSED_FILE: Mapping[str, Refusal] = {"expires_after": _KEPT}
REFUSED_BATCH: Mapping[str, Refusal] = {"output_expires_after": _KEPT}
_Content = Annotated[str, WithJsonSchema({"type": "string", "format": "binary"})]
BatchUrl = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]


class FileFields(Fields):
    """`POST /v1/files`, as multipart/form-data."""

    file: _Content = Field(
        description="the content, with a filename: JSON lines, each a request, of --max-file-bytes at most"
    )
    purpose: Literal["batch"] = Field(description="batch: the input of batches")


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


class BatchListFields(Fields):
    """The query of `GET /v1/batches`, the newest first."""

    after: str | None = note("the id of the last batch of the page before")
    limit: int | None = note("1 to 100 batches; default 20", 1, MOST_BATCHES)


class NoFields(Fields):
    """`POST /v1/batches/ID/cancel`: nothing, or an empty object."""
