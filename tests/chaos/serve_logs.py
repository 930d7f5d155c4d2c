"""What replicas and routers have logged, whenever they ended: how each loss of a link is called there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

LOST = re.compile(r"is lost with (\d+) requests: (\w+)")


class ServeLogs:
    """The files of Serve's processes. folder: Ray's, of the session."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: Counter[Path] = Counter()

    def news(self) -> str:
        """Return what was logged since the last call."""
        news = []
        for path in sorted((self._folder / "serve").glob("*.log")):
            with path.open() as file:
                file.seek(self._read[path])
                news.append(file.read())
                self._read[path] = file.tell()
        return "".join(news)


def check_announced(logged: str) -> None:
    """Fail unless replicas went, and every one that had requests of a router when it went had told that router."""
    losses = [(int(count), code) for count, code in LOST.findall(logged)]
    assert losses, "no router let go of a replica"
    assert all(code == "drained" for count, code in losses if count), f"requests were lost with a replica: {losses}"
