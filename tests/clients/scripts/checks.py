"""What the scripts share: where the server is, what the model may call, and how a check is told.

    python use_openai.py --url http://127.0.0.1:8000/v1 --model demo

`--url`, `--model` and `--key` may stand in SQUADRON_URL, SQUADRON_MODEL and SQUADRON_KEY. Each check prints one line:
`ok chat`, or `FAILED chat: why`; the script ends with 1 where one failed.
"""

import argparse
import asyncio
import inspect
import os
import sys
import traceback
from typing import Literal

from pydantic import BaseModel, Field

_parser = argparse.ArgumentParser()
_parser.add_argument("--url", default=os.environ.get("SQUADRON_URL", "http://127.0.0.1:8000/v1"))
_parser.add_argument("--model", default=os.environ.get("SQUADRON_MODEL", "demo"))
# Libraries want a key even where the server wants none.
_parser.add_argument("--key", default=os.environ.get("SQUADRON_KEY", "none"))
_given = _parser.parse_args()
URL, MODEL, KEY = _given.url, _given.model, _given.key

QUESTION = "What does os.path.join do?"
City = Literal["Paris", "Cologne", "Tokyo"]
DEGREES = {"Paris": 10, "Cologne": 11, "Tokyo": 12}


def weather(city: City) -> str:
    """Tell the weather in a city."""
    return f"It is {DEGREES[city]} degrees in {city}."


class Report(BaseModel):
    """The weather in a city. Everything in it is bounded: a small model may never come to an end by itself."""

    city: City
    degrees: int
    words: list[Literal["warm", "cold"]] | None = Field(None, max_length=2)


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
