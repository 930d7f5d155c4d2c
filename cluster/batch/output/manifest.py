"""What an output is, written when it is whole."""

from __future__ import annotations

import msgspec

from cluster.batch.errors import BatchError
from cluster.batch.ledger.records import Job
from cluster.batch.output.drafts import OutputFile
from cluster.batch.output.places import CLAIM, ERRORS, MANIFEST, Place
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
    if manifest is None or manifest.job.digest != job.digest or place.size(CLAIM) is not None:
        return False
    if (manifest.style, manifest.answer_column) != (spec.style, spec.answer_column):
        return False
    return _sizes(place) == _told_sizes(manifest)


def is_ours(place: Place) -> bool:
    """Whether nothing lies at an output but what a batch put there, by its manifest or its claim."""
    found = _sizes(place)
    if not found or place.size(CLAIM) is not None:
        return True
    manifest = manifest_at(place)
    return manifest is not None and found.items() <= _told_sizes(manifest).items()


def _sizes(place: Place) -> dict[str, int]:
    """Return the files of an output that are there, with their bytes."""
    sizes = {name: place.size(name) for name in ("", ERRORS)}
    return {name: size for name, size in sizes.items() if size is not None}


def _told_sizes(manifest: Manifest) -> dict[str, int]:
    files = {"": manifest.output, ERRORS: manifest.error_file}
    return {name: file.size for name, file in files.items() if file is not None}
