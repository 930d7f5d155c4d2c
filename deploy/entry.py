"""What `squadron` runs: Ctrl-C while the command is imported, which takes a moment, ends it without a word."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command."""
    try:
        from deploy.main import main as run
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    run()
