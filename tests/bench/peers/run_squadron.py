"""This repository's engine, measured for `python -m tests.bench.peers`."""

from __future__ import annotations

from importlib.metadata import version

import torch
from child import answer, asked

from engine.llm import LLM
from engine.sampling_params import SamplingParams


def main() -> None:
    job = asked()
    torch.set_num_threads(job.threads)
    settings = {"max_model_len": job.max_model_len, "enable_prefix_caching": False}
    note = ""
    if job.dtype != job.activations:
        settings |= {"quantization": job.dtype, "quantize_lm_head": True}
        note = f"--quantization {job.dtype} --quantize-lm-head, activations in {job.activations}"
    with LLM(job.model, dtype=job.activations, device="cpu", **settings) as llm:

        def generate(prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
            params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in outputs]
            results = llm.generate(prompts, params, use_tqdm=False)
            return [list(result.outputs[0].token_ids) for result in results]

        answer(generate, job, version("squadron"), note=note)


if __name__ == "__main__":
    main()
