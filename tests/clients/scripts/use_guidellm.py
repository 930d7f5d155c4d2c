"""guidellm: its benchmark of chat completions, completions and responses, with prompts that it makes itself."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import KEY, MODEL, TOKENIZER, URL, run

GUIDELLM = Path(sys.executable).parent / "guidellm"
REQUESTS, OUTPUT_TOKENS = 6, 16


def benchmark(request_format, profile="kind=concurrent,streams=2"):
    """Run one; its requests. All must have been answered, with as many tokens as were asked for."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        server = f"target={URL.removesuffix('/v1')},model={MODEL},api_key={KEY}"
        asked = {
            "--backend": f"kind=openai_http,request_format={request_format},{server}",
            "--profile": profile,
            "--constraint": f"kind=max_requests,count={REQUESTS}",
            "--tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
            "--data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}",
            "--output": f"kind=json,path={report}",
        }
        flags = [word for pair in asked.items() for word in pair]
        done = subprocess.run([GUIDELLM, "run", *flags, "--disable-console"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-1000:]
        (found,) = json.loads(report.read_text())["benchmarks"]
    assert found["metrics"]["request_totals"] == {
        "successful": REQUESTS,
        "errored": 0,
        "incomplete": 0,
        "total": REQUESTS,
    }
    requests = found["requests"]["successful"]
    assert [one["output_tokens"] for one in requests] == [OUTPUT_TOKENS] * REQUESTS
    assert all(0 < one["time_to_first_token_ms"] / 1000 < one["request_latency"] for one in requests)
    assert all(one["prompt_tokens"] >= 32 and one["output"] for one in requests)
    return requests


def chat():
    benchmark("/v1/chat/completions")


def completions():
    benchmark("/v1/completions", "kind=constant,rate=10")


def responses():
    benchmark("/v1/responses", "kind=synchronous")


if __name__ == "__main__":
    run(chat, completions, responses)
