"""The tokenizer of a model folder: text to ids, chat messages to a prompt, ids to text.

transformers reads the folder, without torch where the folder itself says which class reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from engine.config import split_revision
from engine.errors import CheckpointError, ConfigError, InvalidRequestError
from engine.sampling_params import SamplingParams
from engine.text.control_tokens import ControlTokens
from engine.text.detokenizer import StopStrings, TextDecoders, TextStream

# `AutoTokenizer` imports torch, which a router never uses, to weigh what a folder declares against what it knows of
# its model. For these models it takes these two declarations as they are, and both mean `PreTrainedTokenizerFast`.
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
MOST_TOLD = 500  # characters of the libraries' errors
TAKEN_AS_DECLARED = ("llama", "qwen3", "gemma2", "gemma3_text")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
LONG_TEXT = 16_384  # characters from which on encoding takes milliseconds: worth a thread, and worth freeing the GIL


class Tokenizer:
    """Text to ids and back, for one model. All methods may be called from any number of threads at once.

    vocab_size: ids known to the tokenizer are below this (the model's vocabulary may be padded beyond it).
    eos_token_id: the id that ends a text, or None.
    """

    def __init__(self, name: str, chat_template: str | None = None) -> None:
        """Load from a local folder or a hub id that transformers has cached.

        chat_template: Jinja in the place of the model's own, see `read_chat_template`. Raises `CheckpointError`.
        """
        self.name = name
        self._hf = load_tokenizer(name)
        if chat_template is not None:
            self._hf.chat_template = chat_template
        self._backend: Backend = self._hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._decoders = TextDecoders(self._backend)
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos_token_id: int | None = self._hf.eos_token_id

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Return the ids of `text`; the GIL is free while a long text is encoded.

        Raises `InvalidRequestError` naming `param` when the text is not valid Unicode (half of a surrogate pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"{param} is not valid Unicode: half of a surrogate pair at character {error.start}", param
            ) from error
        if len(text) < LONG_TEXT:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids` as a text of its own (`text_streams` is for what follows a prompt)."""
        decoder = self._decoders.decoder(skip_special_tokens)
        return decoder.feed(list(token_ids)) + decoder.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token stands for; a token may be half a character."""
        return self._decoders.token_bytes(token_id)

    def vocabulary(self, size: int) -> list[bytes]:
        """Return what each id below `size` adds to a text; nothing for special tokens and unknown ids."""
        known = min(size, self.vocab_size)
        return [self._decoders.text_bytes(token) for token in range(known)] + [b""] * (size - known)

    def text_streams(self, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> list[TextStream]:
        """Return one text stream for each of the `params.n` choices that go on after the prompt."""
        stops = StopStrings(params.stop) if params.stop else None
        return [
            TextStream(
                self._decoders.decoder(params.skip_special_tokens, prompt_token_ids),
                stops,
                params.include_stop_str_in_output,
                params.min_tokens,
            )
            for _ in range(params.n)
        ]

    def with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the tokens of its bad words, each as it is written at the start of a text and within.

        As in vLLM. Raises `InvalidRequestError` when a word has no tokens.
        """
        if not params.bad_words:
            return params
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            alone = self.encode(word.lstrip(), add_special_tokens=False, param="bad_words")
            within = self.encode(" " + word.lstrip(), add_special_tokens=False, param="bad_words")
            if not alone:
                raise InvalidRequestError(f"bad_words holds {word!r}, which has no tokens", "bad_words")
            found[tuple(alone)] = None
            # A tokenizer that writes the space as a token of its own gives nothing new.
            if within[:1] != alone[:1] and len(within) == len(alone):
                found[tuple(within)] = None
        return replace(params, bad_words_ids=tuple(found))

    def info(self) -> dict[str, Any]:
        """Return what describes it to clients that tokenize by themselves: special tokens as texts, the template."""
        return {
            "tokenizer_class": type(self._hf).__name__,
            "vocab_size": self.vocab_size,
            "chat_template": self.chat_template,
            **{name: getattr(self._hf, name) for name in SPECIAL_TOKENS},
        }

    @property
    def chat_template(self) -> str | None:
        """The chat template (Jinja), the model's own or the one given in its place; or None."""
        if self._hf.chat_template is None:
            return None
        template: str = self._hf.get_chat_template()
        return template

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Return the ids of a conversation, as those of `render_chat`; control tokens in its own text are plain text.

        Raises `InvalidRequestError` naming `messages`.
        """
        try:
            guarded = self._control.guard(messages, options or {})
        except UnicodeEncodeError:
            guarded = None  # refused below, by its place
        text = self.render_chat(
            messages if guarded is None else guarded.messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            options=options if guarded is None else guarded.options,
        )
        if guarded is None:
            return self.encode(text, add_special_tokens=add_special_tokens, param="messages")
        return self._control.encode(text, guarded.mark, add_special_tokens)

    @cached_property
    def _control(self) -> ControlTokens:
        templates = self._hf.chat_template  # one, or several by name
        return ControlTokens(self._backend, str(templates))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
        template: str | None = None,
    ) -> str:
        """Return the prompt text of a conversation, by `template` or `chat_template`, in transformers' sandbox.

        messages: dicts with `role` and `content`. options: extra variables of the template (`enable_thinking`).
        The text holds its special tokens already: encode it with `add_special_tokens=False`.
        Raises `InvalidRequestError` naming `messages` when there is no template or the template refuses them.
        """
        if template is None and self._hf.chat_template is None:
            raise InvalidRequestError(
                f"messages cannot be used: the model {self.name!r} has no chat template; send a plain prompt to "
                "completions instead",
                "messages",
                "chat_template_missing",
            )
        try:
            text: str = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(options or {}),
            )
        except Exception as error:  # a template may fail in any way; whatever it is, these messages caused it
            raise InvalidRequestError(
                f"messages do not fit the model's chat template: {error}", "messages", "chat_template_error"
            ) from error
        return text


def read_chat_template(given: str) -> str:
    """Return the Jinja of a file, or `given` itself where it is a template and not a path, as vLLM's flag takes it.

    Raises `ConfigError` naming `chat_template` for a file that cannot be read and for what is no Jinja.
    """
    template = given
    if not any(mark in given for mark in ("{{", "{%", "{#")):
        try:
            template = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(
                f"chat_template: {given} cannot be read: {why}; give a file of Jinja, such as template.jinja, or the "
                "template itself",
                "chat_template",
            ) from error
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        _compile_jinja_template(template)
    except Exception as error:  # jinja2 names the line
        raise ConfigError(f"chat_template: {given[:MOST_TOLD]} is no Jinja: {error}", "chat_template") from error
    return template


def load_tokenizer(name: str) -> Any:
    """Return transformers' fast tokenizer of a folder or a hub id, which may end with @ and a revision.

    Raises `CheckpointError`.
    """
    import transformers

    try:
        if _declares_generic(Path(name).expanduser()):
            loaded = transformers.PreTrainedTokenizerFast.from_pretrained(Path(name).expanduser())
        else:
            where, revision = (name, None) if Path(name).expanduser().is_dir() else split_revision(name)
            more = {} if revision is None else {"revision": revision}
            loaded = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False, use_fast=True, **more)
    except Exception as error:
        # The tokenizers library raises plain `Exception` for a file that it cannot read. No error of a damaged file
        # is to be taken for one of ours.
        told = str(error)[:MOST_TOLD]
        raise CheckpointError(f"no usable tokenizer in {name!r} (tokenizer.json is needed): {told}") from error
    if not getattr(loaded, "is_fast", False):
        raise CheckpointError(f"the tokenizer of {name!r} has no fast version; add a tokenizer.json to the folder")
    return loaded


def _declares_generic(folder: Path) -> bool:
    """Return whether `PreTrainedTokenizerFast` is what reads the folder; in doubt transformers decides."""
    try:
        declared = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return (
            (folder / "tokenizer.json").is_file()
            and declared["tokenizer_class"] in GENERIC_CLASSES
            and "auto_map" not in declared
            and model["model_type"] in TAKEN_AS_DECLARED
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
