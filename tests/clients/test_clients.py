"""`python -m tests.clients`: what it lists, what it writes into the docs, and how it tells what failed.

Clients are not installed here: `python -m tests.clients` does that. The scripts of those run that are there anyway.
"""

import ast
import io
import re
import subprocess
import sys
from dataclasses import replace
from datetime import date
from importlib import metadata

import pytest
from rich.console import Console

from tests.clients import install as installing
from tests.clients.__main__ import chosen, main, started_server, table
from tests.clients.catalogue import CLIENTS, SCRIPTS, Client
from tests.clients.install import NotInstallableError, command, install
from tests.clients.matrix import ALL, PAGE, page_with, row_of, rows_of
from tests.clients.running import Outcome, Result, Server, run_script, try_client

CHECKS = ("chat", "stream", "tools", "structured")
CLIENT = Client("some", "use_some.py", ("some[more]==1.0",), CHECKS)
SERVER = Server("http://127.0.0.1:1/v1", "demo")
GOOD = "\n".join(f"print('ok {name}')" for name in CHECKS)


def ran(tmp_path, text, **limits):
    script = tmp_path / "use_some.py"
    script.write_text(text)
    return run_script(CLIENT, [sys.executable, str(script), *SERVER.flags()], **limits)


def test_every_script_is_listed_once():
    files = {path.name for path in SCRIPTS.glob("use_*")}
    assert sorted(client.script for client in CLIENTS) == sorted(files)
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)


def checks_of_python(text):
    tree = ast.parse(text)
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    (call,) = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "run")
    names = [ast.unparse(one) for one in call.args]
    assert set(names) <= defined
    return names


def checks_of_javascript(text):
    (inside,) = re.findall(r"^await run\(\{(.*)\}\)$", text, re.MULTILINE)
    keys = [one.partition(":")[0].strip() for one in inside.split(",")]
    return [re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", key) for key in keys]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_script_runs_the_checks_that_the_catalogue_says(client):
    text = (SCRIPTS / client.script).read_text()
    found = checks_of_javascript(text) if client.is_javascript else checks_of_python(text)
    assert tuple(found) == client.checks


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_versions_are_pinned(client):
    exact = r".+@\d+(\.\d+)+" if client.is_javascript else r"[^=]+==\d+(\.\d+)+"
    assert client.packages
    assert all(re.fullmatch(exact, package) for package in client.packages)


def test_the_page_has_a_row_for_each_client():
    assert list(rows_of(PAGE.read_text())) == [client.name for client in CLIENTS]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_the_page_tells_of_a_run_of_what_the_catalogue_says(client):
    """Other versions or checks need a run, which writes the row."""
    row = rows_of(PAGE.read_text())[client.name]
    asked = f"run: python -m tests.clients --page --only {client.name}"
    assert row == row_of(client, row.passed, date.fromisoformat(row.day).isoformat()), asked
    some = set(row.passed.partition(";")[0].split(", ")) < set(client.checks)
    assert some or row.passed == ALL or row.passed.startswith(Outcome.NOT_INSTALLABLE), asked


def test_a_page_gets_the_rows_of_a_run_in_the_order_of_the_catalogue():
    head = PAGE.read_text().partition("| `openai` |")[0]
    first, second, third = CLIENTS[:3]
    other = "| `other` | `x==1` | chat | all | 2026-01-01 | `x` |\n"
    runs = [Result(third, Outcome.PASSED, third.checks), Result(first, Outcome.FAILED, ("chat",), "stream: a | b\nc")]
    page = page_with(f"{head}{other}\nAnd more.\n", runs, date(2026, 12, 1))
    assert "other" not in page
    assert page.startswith(head)
    assert page.endswith(" |\n\nAnd more.\n")
    assert list(rows_of(page)) == [first.name, third.name]
    failed = "chat; failed: stream: a \\| b c"
    assert rows_of(page)[first.name].passed == failed
    assert rows_of(page)[third.name] == row_of(third, ALL, "2026-12-01")
    page = page_with(page, [Result(second, Outcome.NOT_INSTALLABLE, reason="no")], date(2026, 12, 2))
    assert [row.passed for row in rows_of(page).values()] == [failed, "not installable: no", ALL]
    with pytest.raises(ValueError, match=r"no table that begins with \| Client \|"):
        page_with("# Clients\n", runs, date(2026, 12, 1))


def test_the_command_writes_the_row_of_each_run_and_leaves_those_of_others(monkeypatch, tmp_path):
    page = tmp_path / "clients.md"
    page.write_text(PAGE.read_text())
    first, second = CLIENTS[:2]

    def tried(client, *_):
        if client is second:  # another run has written meanwhile
            newer = [Result(first, Outcome.FAILED, reason="newer")]
            page.write_text(page_with(page.read_text(), newer, date(2026, 12, 1)))
        return Result(client, Outcome.PASSED, client.checks)

    monkeypatch.setattr("tests.clients.__main__.PAGE", page)
    monkeypatch.setattr("tests.clients.__main__.try_client", tried)
    assert main(["--url", SERVER.url, "--page", "--only", first.name, second.name]) == 0
    rows = rows_of(page.read_text())
    assert rows[first.name] == row_of(first, "failed: newer", "2026-12-01")
    assert rows[second.name].passed == ALL
    assert list(rows) == [client.name for client in CLIENTS]


def is_installed(client):
    names = [re.split(r"[\[=]", package)[0] for package in client.packages]
    return all(any(metadata.distributions(name=name)) for name in names)


def test_the_scripts_of_clients_that_are_installed_here_run():
    """At whichever version. Tests of the API need openai, so that it is always among them."""
    here = [client for client in CLIENTS if not client.is_javascript and is_installed(client)]
    assert "openai" in [client.name for client in here]
    with started_server() as url:
        for client in here:
            arguments = [sys.executable, str(SCRIPTS / client.script), *Server(url, "demo").flags()]
            found = run_script(client, arguments)
            assert found.outcome is Outcome.PASSED, (client.name, found.reason)


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
