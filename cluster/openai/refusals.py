"""Fields of the API, and of servers like this one, that are refused, with what to send instead.

A field with a value that asks for nothing is let through: clients send their defaults. One that could not change the
answer is a hint (`cluster.openai.fields`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """neutral: values that ask for nothing. instead: what a client can do, after "NAME is not supported ...; ".

    hints: values, or types of values, that only hint.
    """

    neutral: tuple[Any, ...] = ()
    instead: str = "leave it out"
    hints: tuple[Any, ...] = ()

    def lets_through(self, value: Any) -> bool:
        """Whether `value` asks for nothing; null never does."""
        return value is None or _is_among(value, self.neutral)

    def is_hint(self, value: Any) -> bool:
        """Whether `value` could not change the answer."""
        return type(value) in self.hints or _is_among(value, self.hints)


def _is_among(value: Any, known: tuple[Any, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in known)


def _use(field: str, neutral: tuple[Any, ...] = ()) -> Refusal:
    return Refusal(neutral, f"use {field}")


# OpenAI's own.
OPENAI_COMPLETION: Mapping[str, Refusal] = {
    "best_of": Refusal((1,), "ask for n choices and choose among them"),
    "suffix": Refusal(("",), "write the infill prompt that the model was trained on"),
}
OPENAI_CHAT: Mapping[str, Refusal] = {
    "audio": Refusal(),
    "function_call": _use("tool_choice", ("none", "auto")),
    "functions": _use("tools", ([],)),
    "modalities": Refusal((["text"],), "text is the only one"),
    "moderation": Refusal(),
    "prediction": Refusal(hints=(dict,)),
    "prompt_cache_options": Refusal(({}, {"mode": "implicit"}), "prefixes are cached automatically", (dict,)),
    "prompt_cache_retention": Refusal(("in_memory",), "prefixes are kept in memory", (str,)),
    "service_tier": Refusal(("auto", "default"), "use priority", (str,)),
    "store": Refusal((False,), "nothing is stored here"),
    "verbosity": Refusal(("medium",), "ask for it in a message", ("low", "high")),
    "web_search_options": Refusal(),
}
# What vLLM and SGLang know, or knew: the refusal names the new name.
EXTENSIONS: Mapping[str, Refusal] = {
    "guided_json": _use("structured_outputs={'json': ...} or response_format"),
    "guided_regex": _use("structured_outputs={'regex': ...}"),
    "guided_choice": _use("structured_outputs={'choice': [...]}"),
    "guided_grammar": _use("structured_outputs={'grammar': ...}"),
    "guided_json_object": _use("structured_outputs={'json_object': true} or response_format", (False,)),
    "guided_decoding_backend": Refusal((), "there is one backend; send structured_outputs alone", (str,)),
    "guided_whitespace_pattern": Refusal((), "write the white space into structured_outputs={'grammar': ...}"),
    "structural_tag": _use("tools or structured_outputs={'grammar': ...}"),
    "json_schema": _use("response_format or structured_outputs={'json': ...}"),
    "use_beam_search": Refusal((False,), "ask for n choices and choose among them"),
    "length_penalty": Refusal((1, 1.0), "there is no beam search", (int, float)),
    "spaces_between_special_tokens": Refusal((True,)),
    "logits_processors": _use("logit_bias, allowed_token_ids or structured_outputs", ([],)),
    "mm_processor_kwargs": Refusal(({},), "this model reads text only", (dict,)),
    "media_io_kwargs": Refusal(({},), "this model reads text only", (dict,)),
    "kv_transfer_params": Refusal(({},), "the router places requests"),
    "vllm_xargs": Refusal(({},)),
    "lora_path": Refusal(),
    "extra_body": Refusal(({},), "send what is in it beside the other fields: the openai package does so"),
}
CHAT_EXTENSIONS: Mapping[str, Refusal] = {
    "chat_template": Refusal((), "the model's own template is used"),
    "documents": Refusal(([],), "put them into a message"),
    "echo": Refusal((False,), "use completions, which has it"),
    "prompt": _use("messages, or completions"),
}
# Fields of chats that some clients send with every call of theirs, and that could not change what it returns.
SENT_ANYWHERE: Mapping[str, Refusal] = {
    "metadata": Refusal((), "nothing is stored here", (dict,)),
    "prompt_cache_key": Refusal((), "prefixes are found automatically", (str,)),
    "reasoning_effort": Refusal((), "use chat completions", (str,)),
    "safety_identifier": Refusal((), "nothing is stored here", (str,)),
    "service_tier": Refusal((), "use priority", (str,)),
    "store": Refusal((), "nothing is stored here", (False,)),
    "verbosity": Refusal((), "use chat completions, and ask for it in a message", ("low", "medium", "high")),
}
# Fields of the other endpoint.
COMPLETION_EXTENSIONS: Mapping[str, Refusal] = {
    **SENT_ANYWHERE,
    "max_completion_tokens": _use("max_tokens"),
    "messages": _use("prompt, or chat completions"),
    "response_format": _use("structured_outputs, or chat completions"),
    "tool_choice": _use("chat completions", ("none",)),
    "tools": _use("chat completions", ([],)),
    "top_logprobs": _use("logprobs, which is a number here"),
}
REFUSED_COMPLETION: Mapping[str, Refusal] = {**OPENAI_COMPLETION, **EXTENSIONS, **COMPLETION_EXTENSIONS}
REFUSED_CHAT: Mapping[str, Refusal] = {**OPENAI_CHAT, **EXTENSIONS, **CHAT_EXTENSIONS}
