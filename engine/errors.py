"""Every error that the engine raises on purpose.

SquadronError
├── ConfigError              a setting is wrong or does not fit; names the flag and a value that works
├── CheckpointError          a model folder is missing, damaged or unsupported; names file and tensor
│   └── UnsupportedFieldError  config.json asks for what a native family does not implement
├── InvalidRequestError      one request is wrong; names the field (`param`)
│   └── PromptTooLongError   prompt (and what it asks for) exceeds what the model or the cache holds
├── GrammarError             the tokens of one request do not match its grammar, or none is left; its request ends
├── StepMemoryError          a step found no memory; the newest request of it ends, the others go on
│   └── ScoresMemoryError    there was none for the log-probabilities of a prompt; its request ends, the step stands
├── PoisonedLogitsError      the model gave NaN or infinity for one sequence; its request ends, the others go on
├── IntegrityError           an invariant of blocks, tables or queues is broken: a bug of ours; the engine ends
├── EngineAsleepError        generation was asked of an LLM that sleeps; `wake_up` comes first
└── EngineDeadError          a rank died or missed its deadline, or an invariant broke; the group ends and is replaced
"""

import copy
import os
from typing import Self


class SquadronError(Exception):
    """Base of all errors; `str(error)` is a sentence for the person who can mend it."""


class ConfigError(SquadronError):
    """A setting is wrong or does not fit.

    `flag` is the setting's name as a field of `EngineConfig` (the command line shows it as `--max-model-len`).
    """

    def __init__(self, message: str, flag: str) -> None:
        super().__init__(message)
        self.flag = flag


class CheckpointError(SquadronError):
    """A checkpoint cannot be used: file missing, tensor missing, extra or mis-shaped, unknown architecture."""


class UnsupportedFieldError(CheckpointError):
    """config.json asks for what a native family does not implement; transformers' layers may."""


class InvalidRequestError(SquadronError):
    """One request is refused; nobody else notices. `param` names the offending field, `code` is stable."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    def about(self, param: str) -> Self:
        """Return the same error with another name for the field, that of an API in front of another one."""
        found = copy.copy(self)
        if self.param is not None:
            found.args = (str(self).replace(self.param, param),)
        found.param = param
        return found


class PromptTooLongError(InvalidRequestError):
    """The prompt, or it and what is to follow, does not fit the model's context or the whole KV cache.

    num_tokens: of the prompt, where that is known.
    """

    def __init__(self, message: str, param: str = "prompt", num_tokens: int | None = None) -> None:
        super().__init__(message, param, "context_length_exceeded")
        self.num_tokens = num_tokens


def context_words(limit: int, of_cache: bool) -> str:
    """Return how the message of a `PromptTooLongError` begins: clients look for these words of OpenAI's.

    limit: tokens. of_cache: whether it is the KV cache that holds no more.
    """
    cache = " here, for the KV cache holds no more" if of_cache else ""
    return f"This model's maximum context length is {limit} tokens{cache}. However, "


class EngineDeadError(SquadronError):
    """A rank died, hung or disagreed, or the engine's own state is broken: it cannot go on."""


class EngineAsleepError(SquadronError):
    """An LLM that sleeps was asked to generate; nothing can come of that before `wake_up`."""


class GrammarError(SquadronError):
    """No token that its rules allow is left to one sequence, or one came that they forbid: that request ends."""


class StepMemoryError(SquadronError):
    """There was no memory for a step; nothing of it was kept, and a smaller one may be run.

    code: stable. client_message: what the client of the request that is shed for it reads.
    """

    code = "out_of_memory"
    client_message = "there was no memory to go on with this request beside the others; it may be sent again"


class ScoresMemoryError(StepMemoryError):
    """There was no memory for the log-probabilities of one request's prompt: that request ends for good."""

    code = "prompt_logprobs_out_of_memory"
    client_message = (
        "there was no memory for the log-probabilities of this prompt; ask for none, or send a shorter prompt"
    )


class PoisonedLogitsError(SquadronError):
    """The model gave NaN or infinity for one sequence: that request ends with an error, the others go on."""


class IntegrityError(SquadronError):
    """An invariant of blocks, tables or queues is broken: a bug of ours, never the caller's fault."""


def redacted(error: BaseException) -> BaseException:
    """Return what a log may show of an error that came from work on a client's texts (`exc_info=`).

    It prints as `error` does, with the kinds and the lines of code of all that led to it, and without any message:
    those of `ValueError`, `KeyError` and of most libraries quote what they were given. Of an `OSError` the number is
    kept, in the system's words.
    """
    return _bare(error, {})


def _bare(error: BaseException, known: dict[int, BaseException]) -> BaseException:
    if id(error) in known:  # contexts may go round in a circle
        return known[id(error)]
    bare = known[id(error)] = _of_its_kind(error, known)
    bare.__traceback__ = error.__traceback__
    if error.__context__ is not None:
        bare.__context__ = _bare(error.__context__, known)
    if error.__cause__ is not None:
        bare.__cause__ = _bare(error.__cause__, known)
    bare.__suppress_context__ = error.__suppress_context__
    return bare


def _of_its_kind(error: BaseException, known: dict[int, BaseException]) -> BaseException:
    if isinstance(error, BaseExceptionGroup):
        return BaseExceptionGroup("several", [_bare(one, known) for one in error.exceptions])
    words: tuple[str, ...] = ()
    if isinstance(error, OSError) and error.errno is not None:
        words = (f"[Errno {error.errno}] {os.strerror(error.errno)}",)
    kind = type(error)
    same_name = type(kind.__name__, (Exception,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
    bare: BaseException = same_name(*words)
    return bare


def flag(name: str) -> str:
    """Spell a setting as it is written on the command line."""
    return "--" + name.replace("_", "-")
