"""What a caller may ask of the sampler. Names and meanings follow vLLM's `SamplingParams`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

from engine.errors import InvalidRequestError
from engine.own_arguments import answers_vllms

MAX_N = 128  # OpenAI's own limit; the wire numbers choices by it
MAX_LOGPROBS = 20  # unless `EngineConfig.max_logprobs` allows more
ALL_LOGPROBS = -1
MAX_LOGPROB_IDS = 128
MOST_LOGPROBS = (
    2**20
)  # of one answer, where they are of more than the best few: all that links and routers hold at once
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_BIASES = 1024
MAX_ALLOWED = 4096
MAX_BAD_WORDS = 128
MAX_GRAMMAR_BYTES = 64 * 1024
LEAST_REPETITION_PENALTY = 0.01  # what divides a logit must keep it within fp32
GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "calls_or_json"]
# Fields of vLLM's `StructuredOutputsParams`.
STRUCTURED_KINDS: Mapping[str, GrammarKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}
WHOLE_OUTPUTS = ("NONE", "CUMULATIVE", "FINAL_ONLY", "0", "2")  # values of vLLM's `RequestOutputKind`
PLAIN = {int, float, bool, str, tuple, list, dict, type(None)}


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the whole output must match.

    kind: what `text` is: a JSON schema, nothing (any JSON object), a regular expression, a JSON list of strings of
    which one is written, a grammar in GBNF (llama.cpp's EBNF) whose start is `root`, or calls of tools beside a JSON
    schema (`engine.grammar.texts.CallsOrJson`).

    Raises `InvalidRequestError` for other kinds, and for a text of more than 64 KiB.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            known = ", ".join(get_args(GrammarKind))
            raise InvalidRequestError(f"structured must be one of {known}, not {self.kind!r}", "structured")
        if len(self.text.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(f"{self.kind} may have at most {MAX_GRAMMAR_BYTES} bytes", "structured")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """vLLM's spelling of `StructuredOutput`, for `structured_outputs`: exactly one of these; there are no options."""

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None


@answers_vllms
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request; validated on construction.

    `temperature=0` is greedy. `top_k=0` (or -1) and `top_p=1` switch those filters off. `max_tokens=None` means
    as many as the context holds. `seed=None` lets the server choose one. `logprobs=k` returns the chosen token's
    log-probability and the k best, -1 all of the vocabulary; `prompt_logprobs=k` the same of every prompt token but
    the first, 20 at most. Log-probabilities are those of the raw logits, before temperature and penalties.

    logprob_token_ids: the tokens whose log-probabilities are told in the place of the best ones, in this order.

    logit_bias: token id -> what is added to its logit, given as a mapping. allowed_token_ids: the only ids that may
    be drawn; empty = all. bad_words: texts that are never completed; bad_words_ids: the token sequences that they
    are, from the tokenizer (`Tokenizer.with_bad_words`). structured: what the output must match; it ends where that
    is complete, so it goes with neither min_tokens nor ignore_eos.

    detokenize, truncate_prompt_tokens: of `LLM` alone: whether texts are made; the last tokens of a prompt that are
    kept, -1 = as many as leave room for `max_tokens`. structured_outputs: vLLM's spelling of `structured`, a mapping
    or an object with one of `STRUCTURED_KINDS`. output_kind: results of `LLM` come when they are whole. extra_args:
    nothing takes any. Numbers and lists may be numpy's.

    Raises `InvalidRequestError` naming the field, also one that is unknown.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    structured: StructuredOutput | None = None
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: Any = None
    output_kind: Any = None
    extra_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if type(value := getattr(self, name)) not in PLAIN:
                object.__setattr__(self, name, plain(value))
        object.__setattr__(self, "stop", _strings(self.stop, "stop", MAX_STOPS))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids, "stop_token_ids", 1024))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(
            self, "allowed_token_ids", _token_ids(self.allowed_token_ids, "allowed_token_ids", MAX_ALLOWED)
        )
        object.__setattr__(self, "bad_words", _strings(self.bad_words, "bad_words", MAX_BAD_WORDS))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _check_integer("n", self.n, 1, MAX_N)
        _check_integer("top_k", self.top_k, 0, 2**31 - 1)
        _check_integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, LEAST_REPETITION_PENALTY, 100.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}", "min_tokens"
                )
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        named = _token_ids(self.logprob_token_ids, "logprob_token_ids", MAX_LOGPROB_IDS)
        object.__setattr__(self, "logprob_token_ids", named)
        if named:
            self._check_named(len(named))
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, ALL_LOGPROBS, 2**31 - 1)
        if self.prompt_logprobs is not None:
            _check_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._take_vllms()
        if self.structured is not None:
            self._check_structured()

    def _take_vllms(self) -> None:
        """Replace what only vLLM's scripts say by what it means here."""
        if type(self.detokenize) is not bool:
            raise InvalidRequestError(
                f"detokenize must be True or False, not {self.detokenize!r}", "detokenize", "invalid_type"
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop is looked for in texts; leave detokenize out", "detokenize")
        keep = self.truncate_prompt_tokens
        if keep is not None and keep != -1:
            _check_integer("truncate_prompt_tokens", keep, 1, 2**31 - 1)
        if str(getattr(self.output_kind, "name", self.output_kind)).upper() not in WHOLE_OUTPUTS:
            raise InvalidRequestError(
                f"output_kind must be FINAL_ONLY: results come when they are whole, not {self.output_kind}",
                "output_kind",
            )
        if self.extra_args:
            given = ", ".join(map(str, self.extra_args))
            raise InvalidRequestError(f"extra_args holds {given}, which nothing takes: leave it out", "extra_args")
        if self.structured_outputs is not None:
            if self.structured is not None:
                raise InvalidRequestError("structured_outputs goes without structured: leave one out", "structured")
            object.__setattr__(self, "structured", _structured(self.structured_outputs))
        for name in ("structured_outputs", "output_kind", "extra_args"):
            object.__setattr__(self, name, None)

    def _check_named(self, count: int) -> None:
        if self.logprobs not in (None, 0, count):
            raise InvalidRequestError(
                f"logprobs must be {count}, as many as logprob_token_ids has, or left out, not {self.logprobs}",
                "logprobs",
            )
        object.__setattr__(self, "logprobs", 0)

    def _check_structured(self) -> None:
        if self.min_tokens:
            raise InvalidRequestError(
                "min_tokens cannot be met beside structured output, which ends where it is complete; leave it out",
                "min_tokens",
            )
        if self.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos cannot be true beside structured output, which ends where it is complete", "ignore_eos"
            )

    def clone(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    @property
    def whole_rows(self) -> bool:
        """Whether log-probabilities are wanted of more tokens than the best few of each step."""
        return bool(self.logprob_token_ids) or (self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS)

    @property
    def num_told(self) -> int:
        """How many of a position's alternatives are told; all that come where only those come that are wanted."""
        return MOST_LOGPROBS if self.whole_rows else self.logprobs or 0

    def num_alternatives(self, vocab_size: int) -> int:
        """Return of how many tokens beside the chosen one log-probabilities are told at each position."""
        if self.logprob_token_ids:
            return len(self.logprob_token_ids)
        wanted = self.logprobs or 0
        return vocab_size if wanted == ALL_LOGPROBS else min(wanted, vocab_size)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < 1e-5


def plain(value: Any) -> Any:
    """Return Python's own number or list for one of numpy or torch, else the value."""
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else tolist()


def _structured(given: Any) -> StructuredOutput:
    """Return what `StructuredOutputsParams`, vLLM's or ours, or a mapping like it, means."""
    names = StructuredOutputsParams.__dataclass_fields__
    fields = given if isinstance(given, Mapping) else {name: getattr(given, name, None) for name in names}
    said = {name: value for name, value in fields.items() if value is not None and value is not False}
    if len(said) != 1 or not said.keys() <= STRUCTURED_KINDS.keys():
        known, found = ", ".join(STRUCTURED_KINDS), ", ".join(said) or "none"
        raise InvalidRequestError(
            f"structured_outputs must hold exactly one of {known}, not {found}", "structured_outputs"
        )
    ((name, value),) = said.items()
    if name == "json_object":
        return StructuredOutput("json_object")
    try:
        text = value if isinstance(value, str) else json.dumps(plain(value))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"structured_outputs.{name} is no JSON: {error}", "structured_outputs") from None
    return StructuredOutput(STRUCTURED_KINDS[name], text)


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, not {value!r}", name, "invalid_type")
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, not {value}", name)


def _check_number(name: str, value: Any, low: float, high: float, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number, not {value!r}", name, "invalid_type")
    if not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be a finite number, not {value}", name)
    if not low <= value <= high or (low_open and value == low):
        above = "above" if low_open else "at least"
        raise InvalidRequestError(f"{name} must be {above} {low:g} and at most {high:g}, not {value}", name)


def _strings(value: str | Sequence[str] | None, name: str, most: int) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value or ())
    if len(strings) > most:
        raise InvalidRequestError(f"{name} takes at most {most} strings, not {len(strings)}", name)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequestError(f"{name} must hold non-empty strings, not {string!r}", name, "invalid_type")
        if len(string.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
            raise InvalidRequestError(f"each string of {name} may have at most {MAX_STOP_BYTES} bytes", name)
    return strings


def _token_ids(value: Sequence[int] | None, name: str, most: int) -> tuple[int, ...]:
    ids = tuple([plain(token) for token in value or ()])
    if len(ids) > most:
        raise InvalidRequestError(f"{name} takes at most {most} ids, not {len(ids)}", name)
    for token in ids:
        _check_integer(name, token, 0, 2**31 - 1)
    return ids


def _biases(value: Mapping[int, float] | Sequence[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    pairs = tuple([(plain(token), plain(bias)) for token, bias in dict(value or ()).items()])
    if len(pairs) > MAX_BIASES:
        raise InvalidRequestError(f"logit_bias takes at most {MAX_BIASES} ids, not {len(pairs)}", "logit_bias")
    for token, bias in pairs:
        _check_integer("logit_bias", token, 0, 2**31 - 1)
        _check_number("logit_bias", bias, -100.0, 100.0)
    return tuple([(token, float(bias)) for token, bias in pairs])
