"""`python -m deploy.probe raylet app`: what Kubernetes' probes run inside a pod.

It uses the standard library alone, so that a probe costs little, and neither wget nor curl, which an image may lack.
With API keys, `/ready` wants one; it is read from a file, because a probe's headers stand in the pod's spec.
"""

from __future__ import annotations

import argparse
import json
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
class Probe:
    """A question to this pod. says: part of a healthy answer. Source: Ray's health routes."""

    port: int
    path: str
    says: str = ""


PROBES = {
    "raylet": Probe(52365, "/api/local_raylet_healthz", "success"),
    "gcs": Probe(8265, "/api/gcs_healthz", "success"),
    "app": Probe(8000, "/ready"),
}


def trouble(probe: Probe, key: str | None = None, seconds: float = SECONDS) -> str | None:
    """Return why a probe failed, None when it passed."""
    url = f"http://127.0.0.1:{probe.port}{probe.path}"
    request = Request(url, headers={} if key is None else {"Authorization": f"Bearer {key}"})
    try:
        # Never by way of the proxies that the environment names.
        with build_opener(ProxyHandler({})).open(request, timeout=seconds) as response:
            body = response.read(65536).decode(errors="replace")
    except HTTPError as error:
        said = error.read(65536).decode(errors="replace")
        return None if _sleeps(said) else f"{url}: {error.code} {said[:500]}".rstrip()
    except (OSError, HTTPException) as error:
        return f"{url}: {error}"
    return None if probe.says in body else f"{url}: {body[:500]}"


def _sleeps(body: str) -> bool:
    """Whether what is not ready is so because an operator put it to sleep: /wake_up has to find its way here."""
    try:
        return bool(json.loads(body)["asleep"])
    except (ValueError, KeyError, TypeError):
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the probes in order; return 0 when all pass, else 1 after printing the first failure."""
    parser = argparse.ArgumentParser(prog="python -m deploy.probe", description="Probe this pod from inside.")
    parser.add_argument("probes", nargs="+", choices=[*PROBES], metavar="|".join(PROBES))
    parser.add_argument("--port", type=int, default=PROBES["app"].port, help="port of the app")
    parser.add_argument("--key-file", type=Path, default=KEY_FILE, help="file of an API key, where there is one")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="longest time of one probe")
    options = parser.parse_args(arguments)
    key = options.key_file.read_text(encoding="ascii").strip() if options.key_file.is_file() else None
    for name in options.probes:
        probe = Probe(options.port, PROBES[name].path) if name == "app" else PROBES[name]
        if found := trouble(probe, key if name == "app" else None, options.seconds):
            print(found)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
