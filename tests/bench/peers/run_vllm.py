"""vLLM's CPU build, measured in its own environment for `python -m tests.bench.peers`."""

from __future__ import annotations

import os

import torch
from child import answer, asked

AVX2_HAS_NOT = ("_is_avx512_supported", "_is_vnni_supported")
AVX512_HAS_NOT = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported")


def lacks(isa: str) -> None:
    """Let torch say that the CPU is `isa`: vLLM asks it which of its libraries to load, and no variable tells it."""
    functions = {"native": (), "avx512": AVX512_HAS_NOT, "avx2": (*AVX512_HAS_NOT, *AVX2_HAS_NOT)}[isa]
    for name in functions:
        getattr(torch.cpu, name)  # an AttributeError says that torch has renamed it
        setattr(torch.cpu, name, lambda: False)


def main() -> None:
    job = asked()
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        # In this process: on two cores, one of two processes would wait for the other.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    lacks(job.isa)
    from vllm import LLM, SamplingParams, __version__

    llm = LLM(
        job.converted or job.model,
        dtype=job.activations,
        max_model_len=job.max_model_len,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in outputs]
        asked_for = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(result.outputs[0].token_ids) for result in llm.generate(asked_for, params, use_tqdm=False)]

    preloaded = [name for name in ("iomp5", "tcmalloc") if name in os.environ.get("LD_PRELOAD", "")]
    note = f"preloaded: {' and '.join(preloaded) or 'nothing'}"
    if job.dtype != job.activations:
        note += f"; reads what `squadron quantize` wrote in {job.dtype}, table plain"
    answer(generate, job, __version__, note=note)


if __name__ == "__main__":
    main()
