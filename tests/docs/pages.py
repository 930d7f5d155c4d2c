"""The pages of docs/reference that are made from the code, each with the function that returns its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.docs import api_page, metrics_page
from tests.docs.settings_pages import configuration_page, flags_page

REFERENCE = metrics_page.PAGE.parent
MADE: Mapping[Path, Callable[[], str]] = {
    REFERENCE / "api.md": api_page.document,
    REFERENCE / "metrics.md": lambda: metrics_page.page(metrics_page.PAGE.read_text(encoding="utf-8")),
    REFERENCE / "flags.md": flags_page,
    REFERENCE / "configuration.md": configuration_page,
}
