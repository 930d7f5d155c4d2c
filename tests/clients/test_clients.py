"""`python -m tests.clients`: what it lists, and how it tells what failed and what did not install.

The libraries themselves are not installed here: `python -m tests.clients` does that.
"""

import ast
import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.clients import install as installing
from tests.clients.__main__ import chosen, main, table
from tests.clients.catalogue import CHECKS, CLIENTS, SCRIPTS, Client
from tests.clients.install import NotInstallableError, command, install
from tests.clients.running import Outcome, Server, run_script, try_client

CLIENT = Client("some", "use_some.py", ("some[more]==1.0",))
SERVER = Server("http://127.0.0.1:1/v1", "demo")
GOOD = "\n".join(f"print('ok {name}')" for name in CHECKS)


def ran(tmp_path, text, **limits):
    script = tmp_path / "use_some.py"
    script.write_text(text)
    return run_script(CLIENT, [sys.executable, str(script), *SERVER.flags()], **limits)


def test_every_script_is_listed_once():
    files = {path.name for path in SCRIPTS.glob("use_*")}
    assert sorted(client.script for client in CLIENTS) == sorted(files)
    assert len({client.name for client in CLIENTS}) == len(CLIENTS) == 11


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_script_can_be_read_and_runs_every_check(client):
    text = (SCRIPTS / client.script).read_text()
    if not client.is_javascript:
        tree = ast.parse(text)
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert set(CHECKS) <= defined
    names = re.search(r"\brun\((.*)\)\s*$", text).group(1)
    assert set(CHECKS) <= set(re.findall(r"\w+", names))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_versions_are_pinned(client):
    exact = r".+@\d+(\.\d+)+" if client.is_javascript else r"[^=]+==\d+(\.\d+)+"
    assert client.packages
    assert all(re.fullmatch(exact, package) for package in client.packages)


def test_the_page_names_each_library_at_the_version_that_is_installed():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "clients.md").read_text()
    for client in CLIENTS:
        for package in client.packages:
            assert package in page, f"docs/guides/clients.md does not name {package}"


def test_the_scripts_checks_are_told_line_by_line(tmp_path):
    text = """
from checks import run
def chat(): pass
def stream(): assert 1 == 2, "no\\n  stream"
async def tools(): raise ValueError("no tools")
def structured(): pass
run(chat, stream, tools, structured)
"""
    (tmp_path / "checks.py").write_text((SCRIPTS / "checks.py").read_text())
    found = ran(tmp_path, text)
    assert (found.outcome, found.checks) == (Outcome.FAILED, ("chat", "structured"))
    assert found.reason.splitlines() == ["stream: AssertionError: no stream", "tools: ValueError: no tools"]


def test_a_script_passes_that_told_of_every_check(tmp_path):
    found = ran(tmp_path, f"{GOOD}\nprint('ok more')")
    assert (found.outcome, found.checks, found.reason) == (Outcome.PASSED, (*CHECKS, "more"), "")


def test_a_script_that_leaves_a_check_out_fails(tmp_path):
    found = ran(tmp_path, GOOD.replace("ok tools", "tools"))
    assert (found.outcome, found.reason) == (Outcome.FAILED, "did not run: tools")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{GOOD}\nraise SystemExit(3)", "exit code 3"),
        ("import a_package_that_nobody_has", "did not run: chat, stream, tools, structured\nModuleNotFoundError"),
    ],
)
def test_a_script_that_ends_badly_fails(tmp_path, text, reason):
    found = ran(tmp_path, text)
    assert found.outcome is Outcome.FAILED
    assert found.reason.startswith(reason)


def test_a_script_that_does_not_end_fails(tmp_path):
    found = ran(tmp_path, "import threading\nthreading.Event().wait()", timeout=0.5)
    assert (found.outcome, found.reason) == (Outcome.FAILED, "not done after 0.5 s")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "WARNING: x\nERROR: Could not find it (from some)\nERROR: No matching distribution found for some",
            "ERROR: No matching distribution found for some",
        ),
        (
            "ERROR: Cannot install a and b\n\n  a wants c\n\nERROR: ResolutionImpossible: for help visit x",
            "ERROR: Cannot install a and b",
        ),
        (
            "npm warn x\nnpm error code ETARGET\nnpm error notarget No matching version found for some@1.0.\n"
            "npm error notarget In most cases\nnpm error A complete log of this run can be found in: x",
            "npm error notarget No matching version found for some@1.0.",
        ),
        ("warning: x\nKilled", "Killed"),
        ("", "it said nothing"),
    ],
    ids=["pip-finds-none", "pip-conflict", "npm", "no-error", "silent"],
)
def test_what_does_not_install_is_told_with_the_installers_words(tmp_path, monkeypatch, said, reason):
    def refuses(arguments, **options):
        raise subprocess.CalledProcessError(1, arguments, stderr=said)

    monkeypatch.setattr(installing.subprocess, "run", refuses)
    found = try_client(CLIENT, SERVER, tmp_path)
    assert (found.outcome, found.reason) == (Outcome.NOT_INSTALLABLE, reason)


def test_without_node_a_library_in_javascript_is_not_installable(tmp_path, monkeypatch):
    monkeypatch.setattr(installing.shutil, "which", lambda _: None)
    with pytest.raises(NotInstallableError, match="node is not installed here"):
        install(replace(CLIENT, script="use_some.mjs"), tmp_path)


def test_what_lies_there_at_the_same_versions_is_not_installed_again(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(installing.subprocess, "run", lambda arguments, **_: ran.append(arguments))
    assert install(CLIENT, tmp_path) == install(CLIENT, tmp_path) == tmp_path / "some"
    assert len(ran) == 1
    install(replace(CLIENT, packages=("some[more]==2.0",)), tmp_path)
    assert ran[-1][-1] == "some[more]==2.0"


def test_scripts_in_javascript_are_run_beside_their_packages(tmp_path):
    found = command(replace(CLIENT, script="use_openai.mjs"), tmp_path, SCRIPTS)
    assert found == ["node", str(tmp_path / "use_openai.mjs")]
    assert (tmp_path / "checks.mjs").is_file()


def test_the_table_shows_each_outcome_with_its_reason(tmp_path):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table([ran(tmp_path, GOOD), ran(tmp_path, "raise SystemExit('why [not]')")]))
    shown = console.export_text()
    for words in ("some[more]==1.0", "passed", "chat stream tools structured", "failed", "why [not]"):
        assert words in shown


def test_the_command_ends_with_1_where_a_library_failed_and_takes_names(monkeypatch, capsys):
    monkeypatch.setattr("tests.clients.__main__.CLIENTS", (CLIENT,))
    for outcome, code in ((Outcome.FAILED, 1), (Outcome.PASSED, 0), (Outcome.NOT_INSTALLABLE, 0)):
        result = replace(run_script(CLIENT, [sys.executable, "-c", ""]), outcome=outcome)
        monkeypatch.setattr("tests.clients.__main__.try_client", lambda *_, result=result: result)
        assert main(["--url", SERVER.url]) == code
    assert chosen(["some"]) == [CLIENT]
    with pytest.raises(SystemExit):
        main(["--only", "other"])
    assert "invalid choice: 'other'" in capsys.readouterr().err
