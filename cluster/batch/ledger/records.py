"""What a ledger holds: the job it belongs to, rows that are done, tokens of rows that are not."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from engine.report import TokenLogprob

OK = 200  # the status of a row that has an answer
_OF_A_RUN = ("created", "version")  # what may differ between two runs of one job: the first run's is kept


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch is of: all that decides its output. Two runs of one command have equal jobs, but for `created`.

    rows: number of rows of the input. input_digest: over all rows, in order. model, fingerprint: what answers, and
    `engine.loader.fingerprint.model_identity` of it. settings: what else decides an answer, as JSON: that of
    `cluster.batch.decisive`, and what was asked for. created: seconds since 1970; answers carry it. version: of
    Squadron.
    """

    rows: int
    input_digest: str
    model: str
    fingerprint: str
    settings: str
    created: int
    version: str

    @property
    def digest(self) -> str:
        """32 hex digits, equal for equal jobs, whenever and by which version they are run."""
        decisive = {name: value for name, value in msgspec.to_builtins(self).items() if name not in _OF_A_RUN}
        return blake2b(msgspec.json.encode(decisive, order="sorted"), digest_size=16).hexdigest()


class RowDone(msgspec.Struct, frozen=True, array_like=True):
    """A row that is finished, for good or in error.

    row: its place in the input, from 0. status: as HTTP has it; 200 is an answer, 0 a row that was never asked. body:
    JSON of the answer, or of the error. prompt_tokens, output_tokens: what it took. code: of the error, "" without.
    reasoning_tokens: of the output. cached_tokens: of the prompt, where one replica ran it all; else 0.
    """

    row: int
    status: int
    body: bytes
    prompt_tokens: int = 0
    output_tokens: int = 0
    code: str = ""
    reasoning_tokens: int = 0
    cached_tokens: int = 0


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one choice of a row that runs.

    start: output tokens that it had before. finish: why it ended, if it did. logprobs: one for each token, where the
    row asks for them.
    """

    row: int
    choice: int
    start: int
    tokens: tuple[int, ...]
    finish: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class Parts(msgspec.Struct, frozen=True):
    """The files whose rows count, with their valid lengths in bytes: what an epoch found when it began."""

    rows: dict[str, int]


encode = msgspec.msgpack.Encoder().encode
decode_done = msgspec.msgpack.Decoder(RowDone).decode
decode_progress = msgspec.msgpack.Decoder(Progress).decode
