"""Ask OSV for known holes in what `constraints.txt` pins.

    python -m tests.advisories            0: none known, or nobody to ask; 1: some, each named with its page

Nobody to ask is said so, and is no failure of the code: a build without a network goes on. One question holds all
packages. Format: https://google.github.io/osv.dev/post-v1-querybatch/
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import httpx

PINNED = Path(__file__).parents[1] / "constraints.txt"
OSV = "https://api.osv.dev/v1/querybatch"
PAGE = "https://osv.dev/vulnerability/"
# Advisories that do not concern us, each with the reason: `"GHSA-...": "we never call ..."`.
ACCEPTED: dict[str, str] = {}


class NobodyToAskError(Exception):
    """OSV could not be reached, or did not answer the question."""


def pinned(text: str) -> list[tuple[str, str]]:
    """Return the packages and versions of a file of constraints; raises `ValueError` for a line that pins none."""
    found = []
    for line in text.splitlines():
        if not (said := line.partition("#")[0].strip()):
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;]+)(\s*;.*)?", said)
        if match is None:
            raise ValueError(f"{line!r} pins no version")
        found.append((match[1], match[2].partition("+")[0]))  # a local build is the release, to an advisory
    return found


def advisories(packages: Iterable[tuple[str, str]], client: httpx.Client) -> dict[str, list[str]]:
    """Return the ids of advisories by `name==version`, those with none left out. Raises `NobodyToAskError`."""
    packages = list(packages)
    queries = [{"package": {"ecosystem": "PyPI", "name": name}, "version": version} for name, version in packages]
    try:
        answer = client.post(OSV, json={"queries": queries}).raise_for_status().json()
        results = answer["results"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise NobodyToAskError(f"{OSV}: {type(error).__name__}: {error}") from error
    if len(results) != len(packages):
        raise NobodyToAskError(f"{OSV} answered {len(results)} of {len(packages)} questions")
    told = {}
    for (name, version), result in zip(packages, results, strict=True):
        ids = [one["id"] for one in result.get("vulns", []) if one["id"] not in ACCEPTED]
        if ids:
            told[f"{name}=={version}"] = ids
    return told


def main(client: httpx.Client | None = None) -> int:
    """Ask and print."""
    packages = pinned(PINNED.read_text())
    try:
        with client or httpx.Client(timeout=30) as asked:
            found = advisories(packages, asked)
    except NobodyToAskError as error:
        print(f"advisories: NOT CHECKED, nobody to ask ({error})")
        return 0
    for package, ids in found.items():
        print(f"advisories: {package}: {', '.join(PAGE + one for one in ids)}")
    print(f"advisories: {len(packages)} packages asked for, {len(found)} with a known hole")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
