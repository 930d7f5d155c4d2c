"""aiperf: its profile of chat completions, completions, responses and messages, and of our metrics beside them."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import KEY, MODEL, TOKENIZER, URL, run

AIPERF = Path(sys.executable).parent / "aiperf"
REQUESTS, OUTPUT_TOKENS = 6, 16
METRICS = ("squadron_time_to_first_token_seconds", "squadron_generation_tokens", "squadron_request_success")


SERVER_COUNTS = "--use-server-token-count"


def profile(endpoint, *more):
    """Run one; its figures, and those it read of the server. With the server's counts each request has its tokens."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {
            "--model": MODEL,
            "--url": URL.removesuffix("/v1"),
            "--api-key": KEY,
            "--endpoint-type": endpoint,
            "--tokenizer": TOKENIZER,
            "--concurrency": "2",
            "--request-count": str(REQUESTS),
            "--synthetic-input-tokens-mean": "32",
            "--output-tokens-mean": str(OUTPUT_TOKENS),
            "--extra-inputs": "ignore_eos:true",
            "--artifact-dir": folder,
            "--ui": "none",
        }
        flags = [word for pair in asked.items() for word in pair]
        arguments = [AIPERF, "profile", *flags, *more]
        done = subprocess.run(arguments, capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stdout[-1000:]
        figures, server = (
            json.loads((Path(folder) / name).read_text())
            for name in ("profile_export_aiperf.json", "server_metrics_export.json")
        )
    assert not figures["error_summary"], figures["error_summary"]
    assert figures["request_count"]["avg"] == REQUESTS
    lengths = figures["output_sequence_length"]
    assert lengths["min"] > 0
    assert SERVER_COUNTS not in more or lengths["min"] == lengths["max"] == OUTPUT_TOKENS
    return figures, server["metrics"]


def chat():
    profile("chat", SERVER_COUNTS)


def chat_streamed():
    figures, metrics = profile("chat", "--streaming", SERVER_COUNTS)
    assert 0 < figures["time_to_first_token"]["avg"] < figures["request_latency"]["avg"]
    assert set(METRICS) <= set(metrics)


def completions():
    profile("completions", "--streaming", SERVER_COUNTS)


def responses():
    """A stream that the token limit cut ends with `response.incomplete`, of which aiperf reads no usage."""
    profile("responses", SERVER_COUNTS)
    profile("responses", "--streaming")


def messages():
    profile("messages", "--streaming", SERVER_COUNTS)


if __name__ == "__main__":
    run(chat, chat_streamed, completions, responses, messages)
