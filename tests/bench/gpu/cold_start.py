"""Started by the bench as a process of its own: loads a model, draws one token, tells how long that took.

    python -m tests.bench.gpu.cold_start FOLDER DEVICE SECONDS

SECONDS: when it was started, as `time.time` has it.
"""

from __future__ import annotations

import json
import sys
import time


def main(folder: str, device: str, started: str) -> None:
    """Print the seconds as one line of JSON: to the imports' end, by phase, to the first token."""
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams

    imported = time.time() - float(started)
    with LLM(folder, device=device, dtype="bfloat16", max_model_len=4096) as llm:
        loaded = time.time() - float(started)
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
        first = time.time() - float(started)
        found = {"imports": imported, "loaded": loaded, "first_token": first, "phases": dict(llm.info.phases)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
