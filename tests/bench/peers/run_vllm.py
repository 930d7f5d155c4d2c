"""vLLM's CPU build, measured in its own environment for `python -m tests.bench.peers`."""

from __future__ import annotations

import os

from child import answer, asked


def main() -> None:
    job = asked()
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        # In this process: on two cores, one of two processes would wait for the other.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams, __version__

    llm = LLM(job.model, dtype=job.dtype, max_model_len=job.max_model_len, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in outputs]
        asked_for = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(result.outputs[0].token_ids) for result in llm.generate(asked_for, params, use_tqdm=False)]

    answer(generate, job, __version__)


if __name__ == "__main__":
    main()
