"""How `/ui` is served: open, self-contained, and with a policy that fits its text."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import re

import pytest

from cluster.http.ui import page_headers, page_html
from tests.openai_app import app_for, client_for, saying, served_model


class Page(html.parser.HTMLParser):
    """Notes tags with their attributes, and the text of scripts and styles."""

    def __init__(self):
        super().__init__()
        self.tags, self.inline, self.ids = [], [], set()
        self.feed(page_html())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids |= {value for name, value in attrs if name == "id"}

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] in ("script", "style") and self.cdata_elem:
            self.inline.append((self.cdata_elem, data))


async def test_the_page_is_shown_to_who_has_a_key(tmp_path):
    model = served_model(tmp_path)
    async with client_for(app_for(saying(model, "ok"), model, api_key="secret")) as client:
        shown = await client.get("/ui", auth=("anyone", "secret"))
        refused = [(await client.get(path)).status_code for path in ("/ui", "/metrics", "/v1/models", "/ui/x")]
        posted = await client.post("/ui", auth=("anyone", "secret"))
    assert (shown.status_code, shown.text) == (200, page_html())
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    assert refused == [401] * 4
    assert posted.status_code == 405


def test_the_policy_allows_exactly_the_pages_own_script_and_style():
    policy = page_headers(page_html())["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    expected = {"script": [], "style": []}
    for tag, text in Page().inline:
        expected[tag].append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
    assert [len(texts) for texts in expected.values()] == [1, 1]
    assert rules["script-src"].split() == expected["script"]
    assert rules["style-src"].split() == expected["style"]
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert "unsafe" not in policy and "*" not in policy


def test_a_changed_page_has_another_policy():
    page = page_html()
    changed = page_headers(page.replace('"use strict";', '"use strict"; '))
    assert changed["content-security-policy"] != page_headers(page)["content-security-policy"]


def test_the_page_needs_nothing_from_elsewhere():
    page = Page()
    for tag, attributes in page.tags:
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "style", "action")}, tag
        assert attributes.get("href", "data:").startswith("data:")
    addresses = re.findall(r"https?://[^\s'\"]+", page_html())
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}, "a name of XML, not an address that is asked"


def test_every_label_names_a_field_that_is_there():
    page = Page()
    named = [a["for"] for tag, a in page.tags if tag == "label" and "for" in a]
    named += [a["popovertarget"] for _, a in page.tags if "popovertarget" in a]
    assert len(named) > 5
    assert set(named) <= page.ids


@pytest.mark.parametrize("sink", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("])
def test_no_text_becomes_markup_or_code(sink):
    assert sink not in page_html()
