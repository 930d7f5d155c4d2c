"""`python -m tests.docs` (`make docs`) writes the pages of docs/reference that are made from the code."""

from __future__ import annotations

from tests.docs.pages import MADE

for path, text in MADE.items():
    path.write_text(text(), encoding="utf-8")
    print(f"written: {path}")
