"""OpenVINO GenAI's continuous batching, measured in its own environment for `python -m tests.bench.peers`."""

from __future__ import annotations

import openvino
import openvino_genai as genai
from child import answer, asked

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
CACHE = 4  # GB


def main() -> None:
    job = asked()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = CACHE, False
    precision = PRECISIONS[job.activations]
    # On CPUs its cache is of 8 bits unless told otherwise, which would be another model than the others compute.
    settings = {
        "INFERENCE_NUM_THREADS": job.threads,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
    }
    pipe = genai.ContinuousBatchingPipeline(job.converted, scheduler, "CPU", settings)

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        wanted = [genai.GenerationConfig(max_new_tokens=n, ignore_eos=True, do_sample=False) for n in outputs]
        tensors = [openvino.Tensor([prompt]) for prompt in prompts]
        return [list(result.m_generation_ids[0]) for result in pipe.generate(tensors, wanted)]

    note = f"token ids alone; cache in {precision}"
    if job.dtype != job.activations:
        note += f"; weights as NNCF makes {job.dtype}, table in int8; activations as its CPU plugin chooses"
    answer(generate, job, genai.__version__, note=note)


if __name__ == "__main__":
    main()
