"""What the scripts share: where the server is, what the model may call, and how a check is told.

    python use_openai.py --url http://127.0.0.1:8000/v1 --model demo

`--url`, `--model`, `--key` and `--tokenizer` may stand in SQUADRON_URL, SQUADRON_MODEL, SQUADRON_KEY and
SQUADRON_TOKENIZER. Each check prints one line: `ok chat`, or `FAILED chat: why`; the script ends with 1 where one
failed.
"""

import argparse
import asyncio
import inspect
import json
import os
import sys
import traceback
import urllib.request
from typing import Literal

_parser = argparse.ArgumentParser()
_parser.add_argument("--url", default=os.environ.get("SQUADRON_URL", "http://127.0.0.1:8000/v1"))
_parser.add_argument("--model", default=os.environ.get("SQUADRON_MODEL", "demo"))
# Libraries want a key even where the server wants none.
_parser.add_argument("--key", default=os.environ.get("SQUADRON_KEY", "none"))
# What makes load counts tokens itself.
_parser.add_argument(
    "--tokenizer",
    default=os.environ.get("SQUADRON_TOKENIZER", ""),
    help="the folder or name of the model's tokenizer (default: the model's name)",
)
_given = _parser.parse_args()
URL, MODEL, KEY = _given.url, _given.model, _given.key
TOKENIZER = _given.tokenizer or MODEL

QUESTION = "What does os.path.join do?"
City = Literal["Paris", "Cologne", "Tokyo"]
DEGREES = {"Paris": 10, "Cologne": 11, "Tokyo": 12}


def weather(city: City) -> str:
    """Tell the weather in a city."""
    return f"It is {DEGREES[city]} degrees in {city}."


def too_long_prompt() -> str:
    """Text of more tokens than the model's context holds."""
    asked = urllib.request.Request(f"{URL}/models/{MODEL}", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return "word " * json.load(answer)["max_model_len"]


def run(*checks) -> None:
    """Run the checks, which are functions or coroutine functions that raise where something is wrong; then exit."""
    failed = 0
    for check in checks:
        try:
            if inspect.iscoroutinefunction(check):
                asyncio.run(check())
            else:
                check()
            print(f"ok {check.__name__}", flush=True)
        except Exception as error:
            failed += 1
            traceback.print_exc()
            said = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"FAILED {check.__name__}: {said}", flush=True)
    sys.exit(1 if failed else 0)
