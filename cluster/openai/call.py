"""One accepted call of a client: what every ingress hands on once it has been checked."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cluster.errors import ApiError, as_api_error
from cluster.openai.conversation import Conversation
from cluster.openai.field_types import Prompt
from cluster.openai.reasoning.parsers import ReasoningParser
from cluster.openai.tools.choice import ToolUse
from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How prompts become tokens.

    truncate: keep that many tokens from the end, -1 = as many as fit; None = refuse what is too long.
    add_special_tokens: whether the tokenizer adds its own.
    """

    truncate: int | None = None
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Call:
    """One accepted call of a client: what to generate from, and how to answer.

    request_id: made by the server. client_id: the `request_id` of the client, "" without; only echoed.
    seed: the client's, or a random one. prompts: of a completion; conversation: of a chat. Choices of the answer are
    numbered prompt by prompt: `prompt index x params.n + choice`.
    prompt_logprobs: alternatives of each prompt token that the client is told, None = nothing of them.
    continuous_usage: every chunk tells usage. echo: the prompt comes before the output; echo_only: nothing but the
    prompt was asked for, so the one token that the engine draws is neither shown nor counted.
    structured_param: the client's field that `params.structured` came from. tool_use: how tools are used, None = not
    at all; thinking: parser of what comes before the answer, None = nothing does. created: seconds since 1970.
    tells_cache: whether the answer tells what a prefix cache spared, which depends on what else was asked.
    ignored: fields of the client's that had no use (`Hints.names`).
    """

    request_id: str
    params: SamplingParams
    seed: int
    prompts: tuple[Prompt, ...] = ()
    conversation: Conversation | None = None
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    priority: int = 0
    cache_salt: bytes = b""
    client_id: str = ""
    prompt_logprobs: int | None = None
    continuous_usage: bool = False
    echo: bool = False
    echo_only: bool = False
    prompt_options: PromptOptions = PromptOptions()
    structured_param: str = ""
    tool_use: ToolUse | None = None
    thinking: type[ReasoningParser] | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    tells_cache: bool = True
    ignored: tuple[str, ...] = ()

    def clients_error(self, error: ApiError | InvalidRequestError) -> ApiError:
        """Return an error in the client's words, on every ingress: it names the field that the client sent."""
        typed = as_api_error(error)
        if typed.param == "structured":
            if self.tool_use is not None:
                typed.message = self.tool_use.explained(typed.message)
            typed.param = self.structured_param or "tools"
        elif typed.param == "prompt" and self.conversation is not None:
            typed.param = "messages"
        return typed
