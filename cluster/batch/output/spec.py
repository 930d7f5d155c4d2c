"""What an output is to be: its style, and by its name its format."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

from cluster.batch.sources.found import COMPRESSIONS
from cluster.batch.tasks import RowKind
from engine.errors import ConfigError

LINES = (".jsonl", ".ndjson")
FORMATS = (*LINES, ".csv", ".parquet")
FIGURES = ("finish_reason", "prompt_tokens", "output_tokens")


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
        if not self.answer_column or self.answer_column in FIGURES:
            raise ConfigError(
                f"answer_column {self.answer_column!r} must be a name, and none of {', '.join(FIGURES)}, which stand "
                "beside it; answer is one",
                "answer_column",
            )

    @property
    def format(self) -> str:
        """The suffix that tells the format, in lower case."""
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
        names = (self.answer_column, *FIGURES, details_column(self.answer_column))
        return names if self.style is Style.COLUMNS else ()


def details_column(answer_column: str) -> str:
    """Return the name of the column for all that an answer tells beside its text and `FIGURES`."""
    return f"{answer_column}_details"


def default_style(kind: RowKind, target: str) -> Style:
    """Return the style that is taken when none is asked for: requests are answered in kind where lines are wanted."""
    lines = any(target.lower().removesuffix(one).endswith(LINES) for one in ("", *COMPRESSIONS))
    return Style.OPENAI if kind is RowKind.OPENAI and lines else Style.COLUMNS
