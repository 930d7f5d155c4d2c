"""`python -m deploy.probe raylet app`: looks at this pod from within, for Kubernetes' probes.

Only the standard library, so that a look costs little, and no wget or curl, which an image may not have. `/ready`
wants an API key where there are any; it is read from a file, as a probe's headers stand in the pod's spec.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

KEY_FILE = Path("/etc/squadron/keys/probe-key")
SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Look:
    """What is asked of this machine. says: what the answer holds when all is well. Source: Ray's health routes."""

    port: int
    path: str
    says: str = ""


LOOKS = {
    "raylet": Look(52365, "/api/local_raylet_healthz", "success"),
    "gcs": Look(8265, "/api/gcs_healthz", "success"),
    "app": Look(8000, "/ready"),
}


def trouble(look: Look, key: str | None = None, seconds: float = SECONDS) -> str | None:
    """Return why a look found no health, None where all is well."""
    url = f"http://127.0.0.1:{look.port}{look.path}"
    request = Request(url, headers={} if key is None else {"Authorization": f"Bearer {key}"})
    try:
        # Never by way of the proxies that the environment names.
        with build_opener(ProxyHandler({})).open(request, timeout=seconds) as response:
            body = response.read(65536).decode(errors="replace")
    except HTTPError as error:
        return f"{url}: {error.code} {error.read(500).decode(errors='replace')}".rstrip()
    except (OSError, HTTPException) as error:
        return f"{url}: {error}"
    return None if look.says in body else f"{url}: {body[:500]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the looks in order; return 0 when all is well, else 1 after saying what is not."""
    parser = argparse.ArgumentParser(prog="python -m deploy.probe", description="Look at this pod from within.")
    parser.add_argument("looks", nargs="+", choices=[*LOOKS], metavar="|".join(LOOKS))
    parser.add_argument("--port", type=int, default=LOOKS["app"].port, help="port of the app")
    parser.add_argument("--key-file", type=Path, default=KEY_FILE, help="file of an API key, where there is one")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="longest time of a look")
    options = parser.parse_args(arguments)
    key = options.key_file.read_text(encoding="ascii").strip() if options.key_file.is_file() else None
    for name in options.looks:
        look = Look(options.port, LOOKS[name].path) if name == "app" else LOOKS[name]
        if found := trouble(look, key if name == "app" else None, options.seconds):
            print(found)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
