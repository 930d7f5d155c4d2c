"""What an output is to be (its style, and by its name its format), and its manifest, written when it is whole."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

import msgspec

from cluster.batch.errors import BatchError
from cluster.batch.io.paths import COMPRESSIONS
from cluster.batch.io.places import CLAIM, ERRORS, MANIFEST, OutputFile, Place, place_of
from cluster.batch.ledger.records import Job
from cluster.batch.row_tasks import RowKind
from engine.errors import ConfigError

LINES = (".jsonl", ".ndjson")
FORMATS = (*LINES, ".csv", ".parquet")
RESULT_COLUMNS = ("finish_reason", "prompt_tokens", "output_tokens")


class Style(StrEnum):
    """openai: lines as of OpenAI's batch API. columns: those of the input, and the answer's."""

    OPENAI = "openai"
    COLUMNS = "columns"


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """An output. target: a path or URL. answer_column: of the answer's text, where the style is columns.

    Raises `ConfigError` where these do not go together.
    """

    target: str
    style: Style
    answer_column: str = "answer"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(
                f"output {self.target!r} must end in one of {', '.join(FORMATS)}, lines also with "
                f"{' or '.join(COMPRESSIONS)}",
                "output",
            )
        if self.format == ".parquet" and self.compression:
            raise ConfigError(f"output {self.target!r}: Parquet is compressed within; end it in .parquet", "output")
        if self.style is Style.OPENAI and self.format not in LINES:
            raise ConfigError(
                f"output {self.target!r}: OpenAI batch output is JSON lines; end it in .jsonl, or ask for columns",
                "output",
            )
        if not self.answer_column or self.answer_column in RESULT_COLUMNS:
            raise ConfigError(
                f"answer_column {self.answer_column!r} must be a name, and none of {', '.join(RESULT_COLUMNS)}, "
                "which stand beside it; answer is one",
                "answer_column",
            )

    @property
    def format(self) -> str:
        """The suffix that names the format, in lower case."""
        name = PurePosixPath(self.target)
        return (name.with_suffix("") if self.compression else name).suffix.lower()

    @property
    def compression(self) -> str:
        """`.gz`, `.zst` or ""."""
        suffix = PurePosixPath(self.target).suffix.lower()
        return suffix if suffix in COMPRESSIONS else ""

    @property
    def added_columns(self) -> tuple[str, ...]:
        """Columns that the output has besides the input's, so that no row of the input may have them."""
        names = (self.answer_column, *RESULT_COLUMNS, details_column(self.answer_column))
        return names if self.style is Style.COLUMNS else ()


def details_column(answer_column: str) -> str:
    """Return the name of the column for all that an answer holds beside its text and `RESULT_COLUMNS`."""
    return f"{answer_column}_details"


def default_style(kind: RowKind, target: str) -> Style:
    """Return the style that is taken when none is asked for: requests are answered in kind where lines are wanted."""
    lines = any(target.lower().removesuffix(one).endswith(LINES) for one in ("", *COMPRESSIONS))
    return Style.OPENAI if kind is RowKind.OPENAI and lines else Style.COLUMNS


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


def read_manifest(target: str) -> Manifest | None:
    """Return the manifest of an output, None where there is none. Raises `BatchError` when it is damaged."""
    return _read(place_of(target))


def is_finished(spec: OutputSpec, job: Job) -> bool:
    """Whether the output is there, of this job and style, and as long as its manifest says."""
    place = place_of(spec.target)
    manifest = read_manifest(spec.target)
    if manifest is None or manifest.job.digest != job.digest or place.size(CLAIM) is not None:
        return False
    if (manifest.style, manifest.answer_column) != (spec.style, spec.answer_column):
        return False
    return _sizes(place) == _manifest_sizes(manifest)


def refuse_replacing(target: str) -> None:
    """Raise `BatchError` when something lies at an output that no batch put there, or that cannot be looked at."""
    try:
        ours = _is_ours(place_of(target))
    except OSError as error:
        raise BatchError(f"{target} cannot be looked at: {error.strerror or error}; name another output") from error
    if not ours:
        raise BatchError(
            f"{target} (or its {ERRORS}) is there already and is not what a batch put there, by its {MANIFEST}; name "
            "another output behind the inputs, or delete what is there"
        )


def _is_ours(place: Place) -> bool:
    """Whether nothing lies at an output but what a batch put there, by its manifest or its claim."""
    found = _sizes(place)
    if not found or place.size(CLAIM) is not None:
        return True
    manifest = _read(place)
    return manifest is not None and found.items() <= _manifest_sizes(manifest).items()


def _read(place: Place) -> Manifest | None:
    data = place.read(MANIFEST)
    try:
        return None if data is None else msgspec.json.decode(data, type=Manifest)
    except ValueError as error:
        raise BatchError(
            f"the manifest ({MANIFEST}) is damaged: {error}; remove it and run the batch again"
        ) from error


def _sizes(place: Place) -> dict[str, int]:
    """Return the files of an output that are there, with their bytes."""
    sizes = {name: place.size(name) for name in ("", ERRORS)}
    return {name: size for name, size in sizes.items() if size is not None}


def _manifest_sizes(manifest: Manifest) -> dict[str, int]:
    files = {"": manifest.output, ERRORS: manifest.error_file}
    return {name: file.size for name, file in files.items() if file is not None}
