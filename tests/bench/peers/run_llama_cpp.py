"""llama.cpp, measured in its own environment for `python -m tests.bench.peers`.

Its library computes batches of tokens of any sequences; which ones, its server or a caller chooses. Here, as in its
server: a step has a token of each sequence that is being answered, and fills up with prompts to `STEP` tokens.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass, field
from importlib.metadata import version

import llama_cpp as llama
import numpy as np
from child import Job, answer, asked

STEP = 2048  # tokens; n_batch of its server
FORMS = {"int8": "; weights in Q8_0", "int4": "; weights in Q4_0, table in Q8_0"}
QUIET = llama.llama_log_callback(lambda level, text, data: None)


@dataclass
class Sequence:
    """One prompt and its answer. done: how many tokens the cache has of it."""

    prompt: list[int]
    wanted: int
    place: int = 0
    done: int = 0
    answer: list[int] = field(default_factory=list)


class LlamaCpp:
    """The model with room for `sequences` at once, each of `length` tokens."""

    def __init__(self, model: llama.llama_model_p, job: Job, sequences: int, length: int) -> None:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = sequences * length, sequences, STEP
        params.n_threads = params.n_threads_batch = job.threads
        # F16 is llama.cpp's default.
        params.type_k = params.type_v = llama.GGML_TYPE_F32 if job.dtype == "float32" else llama.GGML_TYPE_F16
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._context = llama.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._batch = llama.llama_batch_init(STEP, 0, 1)
        self._sequences = sequences

    def generate(self, prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), False)
        every = [Sequence(prompt, wanted) for prompt, wanted in zip(prompts, outputs, strict=True)]
        places, waiting, running = deque(range(self._sequences)), deque(every), []
        while waiting or running:
            while waiting and places:
                running.append(waiting.popleft())
                running[-1].place = places.popleft()
            self._step(running)
            for sequence in [each for each in running if len(each.answer) == each.wanted]:
                running.remove(sequence)
                places.append(sequence.place)
                llama.llama_memory_seq_rm(llama.llama_get_memory(self._context), sequence.place, -1, -1)
        return [each.answer for each in every]

    def _step(self, running: list[Sequence]) -> None:
        """Compute one batch: answers first, then prompts while there is room."""
        batch, drawn = self._batch, []
        batch.n_tokens = 0
        for sequence in sorted(running, key=lambda each: not each.answer):
            tokens = sequence.answer[-1:] or sequence.prompt[sequence.done :]
            tokens = tokens[: STEP - batch.n_tokens]
            for token in tokens:
                self._add(token, sequence)
            if tokens and sequence.done >= len(sequence.prompt):
                batch.logits[batch.n_tokens - 1] = 1
                drawn.append((batch.n_tokens - 1, sequence))
        if code := llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode answered {code}")
        for row, sequence in drawn:
            logits = llama.llama_get_logits_ith(self._context, row)
            sequence.answer.append(int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax()))

    def _add(self, token: int, sequence: Sequence) -> None:
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row], batch.pos[row], batch.logits[row] = token, sequence.done, 0
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence.place
        batch.n_tokens += 1
        sequence.done += 1


def main() -> None:
    job = asked()
    llama.llama_log_set(QUIET, ctypes.c_void_p(0))
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(job.converted.encode(), llama.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {job.converted}")
    flags = llama.llama_print_system_info().decode()
    units = [part.split()[0] for part in flags.replace(":", "|").split("|") if part.strip().endswith("= 1")]
    if job.isa == "avx2" and "AVX512" in units:
        raise RuntimeError(f"this llama.cpp was built with {' '.join(units)}, not for AVX2 alone")
    length = max(max(map(len, load.prompts)) + max(load.outputs) for load in (job.mixed, job.even))
    sequences = max(len(each.prompts) for each in (job.mixed, job.even, job.warm_up, job.checked))
    many, one = LlamaCpp(model, job, sequences, length), LlamaCpp(model, job, 1, job.max_model_len)

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        return (one if len(prompts) == 1 else many).generate(prompts, outputs)

    note = f"token ids alone; cache in {'F32' if job.dtype == 'float32' else 'F16'}; built with {' '.join(units)}"
    note += FORMS.get(job.dtype, "")
    answer(generate, job, version("llama-cpp-python"), note=note)


if __name__ == "__main__":
    main()
