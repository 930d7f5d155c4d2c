"""The records of a ledger: the job it belongs to, rows that are done, tokens of rows that are not.

A job holds all that decides its output; two jobs are compared in words when a command is run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from cluster.batch.rows import MAX_TOLD
from cluster.config import ServedModelConfig
from engine.errors import flag
from engine.loader.checkpoint import TEXT_FILES, find_checkpoint
from engine.loader.fingerprint import prompt_fingerprint
from engine.report import TokenLogprob
from engine.sampling_defaults import sampling_defaults
from engine.text.tokenizer import read_chat_template

OK = 200  # the status of a row that has an answer
_OF_A_RUN = ("created", "version")  # what may differ between two runs of one job: the first run's is kept
encode = msgspec.msgpack.Encoder().encode
UNSET = "not set"
SHARED = 20  # characters of what two long values have in common that are shown before they part
# Parts of a job whose values, digests mostly, say nothing to people.
CHANGED = {
    "input_digest": "the input was changed",
    "fingerprint": "the model's weights, dtype or quantization were changed",
    "prompts": "the tokenizer or the chat template was changed",
}
GROUPS = ("columns",)  # settings that hold settings
FLAGS = {"kind": "format", "sampling_defaults": "generation_config"}  # settings whose flag has another name
SETTINGS = (
    "seed",
    "tokenizer",
    "max_model_len",
    "served_model_name",
    "tool_call_parser",
    "reasoning_parser",
    "embedding_pooling",
)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch is of: all that decides its output. Two runs of one command have equal jobs, but for `created`.

    rows: number of rows of the input. input_digest: over all rows, in order. model, fingerprint: what answers, and
    `engine.loader.fingerprint.model_identity` of it. settings: what else decides an answer, as JSON: that of
    `cluster.batch.ledger.records`, and what was asked for. created: seconds since 1970; answers carry it. version: of
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
        parts = {name: value for name, value in msgspec.to_builtins(self).items() if name not in _OF_A_RUN}
        return blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=16).hexdigest()


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


class NewTokens(msgspec.Struct, frozen=True, array_like=True):
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


decode_done = msgspec.msgpack.Decoder(RowDone).decode
decode_tokens = msgspec.msgpack.Decoder(NewTokens).decode


def difference(first: Job, job: Job) -> str | None:
    """Return what of `first` is not so in `job`: the flag and both values, shortened. None where they are equal."""
    if first.digest == job.digest:
        return None
    was, now = _parts(first), _parts(job)
    name = next((one for one in {**was, **now} if was.get(one) != now.get(one)), None)
    if name is None:
        return f"it was begun by Squadron {first.version}, which tells settings in another way than {job.version}"
    return CHANGED.get(name) or f"{flag(FLAGS.get(name, name))} {_change(was.get(name), now.get(name))}"


def _parts(job: Job) -> dict[str, Any]:
    """Return what decides a job, by name."""
    parts = {"input_digest": (job.input_digest, job.rows), "model": job.model, "fingerprint": job.fingerprint}
    return {**parts, **_settings(job.settings)}


def _settings(text: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        found = None
    if not isinstance(found, Mapping):
        return {"settings": text}
    settings = dict(found)
    for group in GROUPS:
        inner = settings.pop(group, None)
        settings |= inner if isinstance(inner, Mapping) else {}
    return settings


def _change(was: Any, now: Any) -> str:
    one, other = _text(was), _text(now)
    longest = max(len(one), len(other))
    shared = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    begin = max(0, shared - SHARED) if longest > MAX_TOLD else 0
    return f"was {_shown(was, one, begin)} and is {_shown(now, other, begin)}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _shown(value: Any, text: str, begin: int) -> str:
    """Return a value from one character on, quoted unless it is a number or a word."""
    if value is None:
        return UNSET
    if not isinstance(value, str | Mapping | list):
        return text
    end = begin + MAX_TOLD
    return repr(f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}")


def _defaults(config: ServedModelConfig) -> dict[str, Any]:
    """Return what requests leave to the model, if it says anything."""
    found = sampling_defaults(
        find_checkpoint(config.source, TEXT_FILES), config.generation_config, config.override_generation_config
    )
    return {"sampling_defaults": found} if found else {}


def answer_settings(config: ServedModelConfig) -> dict[str, Any]:
    """Return it as JSON has it, by name: settings, and what makes prompts of requests. Raises `CheckpointError`."""
    settings = {name: getattr(config, name) for name in SETTINGS}
    template = None if config.chat_template is None else read_chat_template(config.chat_template)
    return {**settings, **_defaults(config), "prompts": prompt_fingerprint(config.source, config.tokenizer, template)}
