"""Offline generation: a model, a list of prompts, their texts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from hashlib import blake2b
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from tqdm import tqdm

import engine.spinning  # noqa: F401  # before torch
from engine.config import EngineConfig, config_fields
from engine.core import EngineCore
from engine.errors import ConfigError, EngineAsleepError, InvalidRequestError, PoisonedLogitsError
from engine.grammar.compile_service import GrammarService
from engine.loader.checkpoint import TEXT_FILES, find_checkpoint
from engine.offline_run import BatchRun, DeferredInterrupt
from engine.outputs import EmbeddingOutput, RequestOutput, normalised
from engine.own_arguments import own_arguments
from engine.prompts import Message, Prompt, as_list, conversations, params_of, truncated
from engine.report import EngineStats
from engine.request import Pooling, Request
from engine.sampling_defaults import AUTO, sampling_defaults
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer, load_tokenizer, read_chat_template
from engine.vllm_advice import CALLS, OFFLINE
from engine.worker.executor_start import ModelInfo, build_executor


def _setting(flag: str) -> str:
    """Return a flag as `LLM` spells it, where it has that setting."""
    name = flag[2:].replace("-", "_")
    return name if name in config_fields() else flag


def _refused(sentence: str, name: str) -> ConfigError:
    return ConfigError(re.sub(r"--[a-z][a-z-]+", lambda found: _setting(found[0]), sentence), name)


BAR_DELAY = 1.0  # seconds: shorter runs need no progress bar


class LLM:
    """A model on this machine, for batches of prompts. Used by one thread; close it, or use it as a context manager.

        with LLM("path/to/model") as llm:
            for result in llm.generate(["Hello"], SamplingParams(max_tokens=20)):
                print(result.outputs[0].text)

    With `tensor_parallel_size` above 1 the other ranks are processes that end with this one. They do not run the main
    program again, so that a plain script, standard input or a notebook will do, without `if __name__ == "__main__"`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        quantization: str | None = None,
        device: str | None = None,
        max_model_len: int | str | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        enable_sleep_mode: bool = False,
        generation_config: str = AUTO,
        override_generation_config: Mapping[str, Any] | None = None,
        seed: int = 0,
        **more: Any,
    ) -> None:
        """Load `model` (local folder or hub id). Settings, and those in `more`, are `EngineConfig`'s fields.

        Arguments of vLLM's `LLM` that ask for what is so here anyway are taken, such as `pipeline_parallel_size=1`.

        enable_sleep_mode: whether `sleep` may be called. generation_config, override_generation_config: where
        `get_default_sampling_params` has them from: "auto", the model; "vllm", nowhere; or a folder.

        Raises `ConfigError` naming the setting, `CheckpointError` naming what is wrong with the model, and
        `EngineDeadError` when a rank did not come up.
        """
        more = dict(own_arguments(more, config_fields(), OFFLINE, "setting", _refused))
        self._may_sleep = enable_sleep_mode
        config = EngineConfig(
            model=str(model),
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            quantization=quantization,
            device=device,
            max_model_len=max_model_len,  # type: ignore[arg-type]  # read as 32k, too
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            enforce_eager=enforce_eager,
            seed=seed,
            **more,
        )
        # Before the tokenizer: of a model that is not there its error would name a missing tokenizer.
        folder = find_checkpoint(config.source, TEXT_FILES)
        self.tokenizer = Tokenizer(config.tokenizer or str(folder))
        said = sampling_defaults(folder, generation_config, json.dumps(override_generation_config or {}))
        self._defaults = SamplingParams().clone(**said)
        self._core, self.info = _engine(config)
        # A closure here would keep this LLM alive.
        vocabulary = partial(self.tokenizer.vocabulary, self.info.vocab_size)
        self._grammars = GrammarService(vocabulary, self.info.eos_token_ids)
        self._num_requests = 0

    def get_tokenizer(self) -> Any:
        """Return transformers' tokenizer of the model; what is set on it changes nothing here."""
        return self._their_tokenizer

    @cached_property
    def _their_tokenizer(self) -> Any:
        return load_tokenizer(self.tokenizer.name)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what a call without `sampling_params` has: what the model's generation_config.json says."""
        return self._defaults

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        prompt_token_ids: Prompt | Sequence[Prompt] | None = None,
        **vllms: Any,
    ) -> list[RequestOutput]:
        """Return one result per prompt, in order.

        prompts: texts or token ids, one or many; ids as a list, an array, or as `{"prompt_token_ids": ...}`.
        sampling_params: one for all, or one per prompt; None = `get_default_sampling_params`.
        prompt_token_ids: a former spelling, in the place of prompts. vllms: vLLM's other arguments, as
        `lora_request=None`, which are refused by name unless they ask for nothing.
        use_tqdm: show progress and tokens/s on stderr when it takes longer than a second.

        The tokens of a request do not depend on the others. One without a seed gets its own from the LLM's seed and
        its number since the LLM was made, so that a program gives the same texts each time it is run.

        Raises `InvalidRequestError` naming prompt and field before anything is run, `EngineAsleepError` between
        `sleep` and `wake_up`, `EngineDeadError` when a rank died. Ctrl-C takes effect after the current step and
        leaves the LLM usable; a second one closes it at once.
        """
        _check_call(self.generate, vllms)
        asked = as_list(prompts if prompt_token_ids is None else prompt_token_ids)
        return self._run(self._tokenized(asked), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **vllms: Any,
    ) -> list[RequestOutput]:
        """Return the answer to one conversation, or to each of several; see `generate`.

        messages: dicts with `role` and `content`, filled into the model's own chat template; `chat_template_kwargs`
        are extra variables of the template, and `tools` those it shows. chat_template: a file of Jinja, or the
        template itself, in its place. add_generation_prompt: begin an answer. continue_final_message: the output goes
        on with the last message.
        Raises `InvalidRequestError` when there is no template, `ConfigError` for one that cannot be read.
        """
        _check_call(self.chat, vllms)
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message=True goes with add_generation_prompt=False: give both",
                "continue_final_message",
            )
        options = {**(chat_template_kwargs or {}), **({} if tools is None else {"tools": tools})}
        template = None if chat_template is None else read_chat_template(chat_template)
        prompts: list[tuple[str | None, list[int]]] = []
        for conversation in conversations(messages):
            text = self.tokenizer.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                options=options,
                template=template,
            )
            prompts.append((text, self.tokenizer.encode(text, add_special_tokens=False, param="messages")))
        return self._run(prompts, sampling_params, use_tqdm)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling: Pooling = "last", use_tqdm: bool = True, **vllms: Any
    ) -> list[EmbeddingOutput]:
        """Return one vector of length 1 per prompt, in order: of the final hidden states, the last or their mean.

        Raises as `generate` does, and `PoisonedLogitsError` when the model gave NaN or infinity for a prompt.
        """
        _check_call(self.embed, vllms)
        if pooling not in get_args(Pooling):
            raise InvalidRequestError(f"pooling must be 'last' or 'mean', not {pooling!r}", "pooling")
        asked = self._tokenized(as_list(prompts))
        nothing = SamplingParams(max_tokens=1, seed=0)
        requests = [replace(self._request(ids, nothing), pooling=pooling) for _, ids in asked]
        run = self._finish(requests, use_tqdm)
        places = enumerate(zip(asked, requests, strict=True))
        return [_embedding(run, request, text, number) for number, ((text, _), request) in places]

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and KV cache back until `wake_up`, for other programs.

        level: 1 keeps the weights in the host's memory (on a CPU they are there anyway and stay); 2 keeps them
        nowhere and reads them from the model's folder again, which may hold newer ones by then. Cached prefixes are
        forgotten.

        Raises `ConfigError` unless the LLM was made with `enable_sleep_mode=True`, and `StepMemoryError` where the
        host has no room for the weights; the LLM is awake then.
        """
        if not self._may_sleep:
            raise ConfigError("sleep needs an LLM made with enable_sleep_mode=True", "enable_sleep_mode")
        self._core.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again, all of it or that of some `tags`: "weights", "kv_cache".

        Raises `CheckpointError` when weights cannot be read again; the LLM then still sleeps.
        """
        self._core.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Return whether any part sleeps, so that nothing can be generated."""
        return self._core.is_sleeping

    def stats(self) -> EngineStats:
        """Return the engine's figures: KV blocks, prefix hits, preemptions, tokens since the start."""
        return self._core.stats()

    def close(self) -> None:
        """Free the model and end the other ranks. Can be called twice."""
        self._grammars.close()
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        given = self._defaults if sampling_params is None else sampling_params
        params = [self.tokenizer.with_bad_words(one) for one in params_of(given, len(prompts))]
        context = self.info.config.context_len
        prompts = [(text, truncated(ids, one, context)) for (text, ids), one in zip(prompts, params, strict=True)]
        requests = [self._request(ids, one) for (_, ids), one in zip(prompts, params, strict=True)]
        run = self._finish(requests, use_tqdm)
        return [
            RequestOutput(text, ids, run.outputs(name), run.num_cached_tokens(name), run.prompt_logprobs(name), name)
            for (text, ids), name in zip(prompts, [request.request_id for request in requests], strict=True)
        ]

    def _finish(self, requests: Sequence[Request], use_tqdm: bool) -> BatchRun:
        if self._core.is_sleeping:
            raise EngineAsleepError("the LLM sleeps; call wake_up() before anything is generated")
        run = BatchRun(self._core, self.tokenizer, requests, self._grammars, self.info.eos_token_ids)
        with DeferredInterrupt() as interrupt, _progress(len(requests), use_tqdm) as bar:
            while run.unfinished:
                self._step(run)
                _show(bar, run)
                _check(interrupt, run)
        return run

    def _step(self, run: BatchRun) -> None:
        try:
            run.step()
        except BaseException:  # in the middle of a step its state is not known
            self.close()
            raise

    def _tokenized(self, prompts: Sequence[str | list[int]]) -> list[tuple[str | None, list[int]]]:
        found: list[tuple[str | None, list[int]]] = []
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                found.append((prompt, self.tokenizer.encode(prompt, param=f"prompts[{number}]")))
            else:
                found.append((None, prompt))
        return found

    def _request(self, token_ids: list[int], params: SamplingParams) -> Request:
        number = self._num_requests
        self._num_requests += 1
        seed = _derived_seed(self.info.config.seed, number) if params.seed is None else params.seed
        return Request(f"offline-{number}", tuple(token_ids), params, seed=seed)


def _check_call(method: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` naming an argument of `method` that it does not have."""
    own = [name for name, one in signature(method).parameters.items() if one.kind is not one.VAR_KEYWORD]
    own_arguments(given, own, CALLS, "argument")


def _engine(config: EngineConfig) -> tuple[EngineCore, ModelInfo]:
    """Return a running engine, and what it runs."""
    executor, info = build_executor(config)
    try:
        core = EngineCore(info.config, executor, info.eos_token_ids, info.vocab_size, info.num_kv_blocks)
    except BaseException:
        executor.close()
        raise
    return core, info


def _embedding(run: BatchRun, request: Request, text: str | None, number: int) -> EmbeddingOutput:
    pooled = run.pooled(request.request_id)
    if pooled is None:
        raise PoisonedLogitsError(f"prompts[{number}]: the model's hidden states were not finite")
    cached = run.num_cached_tokens(request.request_id)
    return EmbeddingOutput(text, list(request.prompt_token_ids), normalised(pooled), cached)


def _derived_seed(seed: int, number: int) -> int:
    """A seed of 63 bits for request `number` of an LLM with `seed`."""
    digest = blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _progress(total: int, wanted: bool) -> tqdm[Any]:
    return tqdm(
        total=total,
        disable=not wanted,
        delay=BAR_DELAY,
        desc="Generating",
        unit="prompt",
        file=sys.stderr,
    )


def _check(interrupt: DeferredInterrupt, run: BatchRun) -> None:
    try:
        interrupt.check()
    except KeyboardInterrupt:
        run.abort()
        raise


def _show(bar: tqdm[Any], run: BatchRun) -> None:
    elapsed = bar.format_dict["elapsed"]
    if elapsed > 0:
        bar.set_postfix_str(f"{run.num_tokens / elapsed:,.0f} tokens/s", refresh=False)
    bar.update(run.num_done - bar.n)
