"""transformers' `generate`, measured for `python -m tests.bench.peers`: one padded batch to the longest output."""

from __future__ import annotations

import torch
from child import answer, asked
from transformers import AutoModelForCausalLM, __version__
from transformers.utils.logging import disable_progress_bar


def main() -> None:
    job = asked()
    torch.set_num_threads(job.threads)
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype)).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        settings = {"max_new_tokens": max(outputs), "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            rows = model.generate(ids, attention_mask=mask, **settings)
        return [row[width : width + n].tolist() for row, n in zip(rows, outputs, strict=True)]

    answer(generate, job, __version__, note="one padded batch, which runs to its longest answer")


if __name__ == "__main__":
    main()
