"""What the documents name exists: pages and sections that they link to, files of the repository."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from engine.vllm_advice import ADVICE
from tests.docs.pages import MADE, REFERENCE

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "helm" / "squadron" / "README.md"])
INDEX = ROOT / "docs" / "README.md"
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:)([^)\s]+)\)")
PATH = re.compile(r"(?<![\w./:~{-])((?:engine|parallel|cluster|deploy|helm|tests)/(?>[\w./-]*\w))(?![*{]|::)")
MODULE = re.compile(r"(?<![\w./*{-])((?>[\w/]+\.(?:py|c)))\b(?!::)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
TEST = re.compile(r"(?<![\w/])([\w/]*(?:\.py)?)::(test_\w+)")
# Flags of other programs.
OTHERS = {
    "--build", "--cert", "--constraint", "--create-namespace", "--current", "--delete-emptydir-data",
    "--docker-password", "--docker-server", "--docker-username", "--enable-auto-tool-choice", "--file", "--for",
    "--from-file", "--from-literal", "--head", "--ignore-daemonsets", "--ignorefile", "--init", "--install", "--key",
    "--metrics-export-port", "--namespace", "--publish", "--repo", "--reuse-values", "--rm", "--selector", "--set",
    "--shm-size", "--tag", "--target", "--temp-dir", "--timeout", "--torch-backend", "--values", "--watch",
    "--working-dir",
}  # fmt: skip

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def links(page: Path) -> list[str]:
    return LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8")))


@cache
def sections(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


@cache
def tracked() -> tuple[str, ...]:
    """Return the paths of all files of the repository, each with a slash before it."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    return tuple(f"/{path}" for path in listed.stdout.decode().splitlines() if (ROOT / path).exists())


@pytest.mark.parametrize("page", MADE, ids=lambda page: page.name)
def test_pages_made_from_the_code_are_up_to_date(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == MADE[page](), "run `make docs`"


@pages
def test_links_lead_to_pages_and_sections_that_exist(page: Path) -> None:
    wrong = []
    for target in links(page):
        path, _, section = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (section and section not in sections(found)):
            wrong.append(target)
    assert wrong == []


@pages
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {path for path in PATH.findall(text) if not (ROOT / path).exists()}
    # A file's name may stand alone (`scheduler.py`), or below tests/.
    modules = {name for name in MODULE.findall(text) if not any(path.endswith(f"/{name}") for path in tracked())}
    assert sorted(named | modules) == []


@pages
def test_tests_that_are_named_exist(page: Path) -> None:
    """As `file.py::test_name`, or as `::test_name` of some file."""
    tests = {path: (ROOT / path[1:]).read_text("utf-8") for path in tracked() if re.search(r"/test_\w+\.py$", path)}
    for file, name in TEST.findall(page.read_text(encoding="utf-8")):
        held = [text for path, text in tests.items() if path.endswith(f"/{file}" if file else ".py")]
        assert any(f"def {name}(" in text for text in held), f"{file}::{name}"


@pages
def test_flags_that_are_named_exist(page: Path) -> None:
    known = {name for made in ("flags.md",) for name in FLAG.findall((REFERENCE / made).read_text(encoding="utf-8"))}
    named = {*FLAG.findall(page.read_text(encoding="utf-8"))}
    theirs = set(ADVICE) if page.name == "from-vllm.md" else set()  # that page tells of them
    assert sorted(named - known - OTHERS - argparse_flags() - theirs) == []


@cache
def argparse_flags() -> frozenset[str]:
    """Return the flags of the benches, the client scripts and other commands of the repository."""
    code = [ROOT / path[1:] for path in tracked() if re.match(r"/(tests/|deploy/(chart|train_demo))", path)]
    texts = [path.read_text(encoding="utf-8") for path in code if path.suffix == ".py"]
    return frozenset(name for text in texts for name in re.findall(r"[\"'](--[a-z][a-z0-9-]+)[\"']", text))


@pages
def test_nobody_is_told_to_install_squadron_from_the_public_index(page: Path) -> None:
    """That name belongs to another project there."""
    assert not re.search(r"install [^`\n]*\bsquadron(\[|[`\s]*$)", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 125


def test_every_page_is_in_the_index() -> None:
    listed = {(INDEX.parent / target.partition("#")[0]).resolve() for target in links(INDEX)}
    assert [page for page in (ROOT / "docs").rglob("*.md") if page not in {*listed, INDEX}] == []
