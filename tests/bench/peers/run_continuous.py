"""transformers' continuous batching, measured for `python -m tests.bench.peers`."""

from __future__ import annotations

import itertools
import time

import torch
from child import Prompts, answer, asked
from transformers import __version__

from tests.bench.gpu.theirs import continuous_batching, their_model
from tests.bench.offline import BATCHED, PAGES

PATIENCE = 1200  # seconds


def main() -> None:
    job = asked()
    torch.set_num_threads(job.threads)
    model = their_model(job.model, getattr(torch, job.dtype), torch.device("cpu"))
    numbers = itertools.count()
    # What it makes room for: prompts as long as any, of as many sequences and tokens.
    most = Prompts([max(job.mixed.prompts + job.first.prompts, key=len)] * len(job.mixed.prompts), job.mixed.outputs)
    settings = {"num_blocks": PAGES, "max_batch_tokens": BATCHED}
    with continuous_batching(model, most, {"do_sample": False}, **settings) as manager:

        def generate(prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
            names = [f"{next(numbers)}" for _ in prompts]
            for name, prompt, count in zip(names, prompts, outputs, strict=True):
                manager.add_request(prompt, name, max_new_tokens=count, eos_token_id=-1)
            found: dict[str, list[int]] = {}
            deadline = time.monotonic() + PATIENCE
            while len(found) < len(names) and time.monotonic() < deadline:
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("transformers' thread has ended")
                if result is not None and result.error is not None:
                    raise RuntimeError(f"transformers failed on a request: {result.error}")
                if result is not None and result.is_finished():
                    found[result.request_id] = list(result.generated_tokens)
            return [found.get(name, []) for name in names]

        note = f"steps of at most {BATCHED} tokens, {PAGES} pages of the cache"
        answer(generate, job, __version__, note=note)


if __name__ == "__main__":
    main()
