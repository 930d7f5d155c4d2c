"""What an output is, written when it is whole."""

from __future__ import annotations

import msgspec

from cluster.batch.errors import BatchError
from cluster.batch.ledger.records import Job
from cluster.batch.output.drafts import OutputFile
from cluster.batch.output.places import ERRORS, MANIFEST, Place
from cluster.batch.output.spec import OutputSpec, Style


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an output is.

    job: what it is of. style, answer_column: as of `OutputSpec`. errors: code -> rows. prompt_tokens, output_tokens:
    of all rows. output: the file of answers. error_file: of the rows that ended in an error; None where there are
    none.
    """

    job: Job
    style: Style
    answer_column: str
    rows: int
    errors: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    output: OutputFile
    error_file: OutputFile | None


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return a manifest as its file holds it."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=2) + b"\n"


def manifest_at(place: Place) -> Manifest | None:
    """Return the manifest of an output, None where there is none. Raises `BatchError` when it is damaged."""
    data = place.read(MANIFEST)
    try:
        return None if data is None else msgspec.json.decode(data, type=Manifest)
    except ValueError as error:
        raise BatchError(
            f"the manifest ({MANIFEST}) is damaged: {error}; remove it and run the batch again"
        ) from error


def is_finished(place: Place, spec: OutputSpec, job: Job) -> bool:
    """Whether the output is there, of this job and style, and as long as its manifest says."""
    manifest = manifest_at(place)
    if manifest is None or manifest.job.difference(job) is not None:
        return False
    if (manifest.style, manifest.answer_column) != (spec.style, spec.answer_column):
        return False
    errors = manifest.error_file
    return place.size("") == manifest.output.size and place.size(ERRORS) == (None if errors is None else errors.size)
