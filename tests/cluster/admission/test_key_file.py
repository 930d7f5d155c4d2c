"""API keys: the file's text, expiry, and a file that changes while requests come."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading

import pytest
import yaml

from cluster.admission.key_file import KeyFile, keys_for, parse_keys
from cluster.admission.keys import (
    DEFAULT_TENANT,
    FixedKeys,
    KeyEntry,
    KeyRing,
    Quota,
    Tenant,
    bearer_key,
    hash_key,
    new_key,
)
from cluster.errors import ApiError
from engine.errors import ConfigError
from tests.openai_app import app_for, saying, served_model, serving

GOOD = f"""
- key: sk-plain
  tenant: team-a
  requests_per_minute: 60
  tokens_per_minute: 1000
  max_concurrent: 4
- {{key_sha256: {hash_key("sk-hashed").hex()}, tenant: team-b, expires: 2027-01-31T12:00:00+01:00}}
- {{key: sk-second, tenant: team-a}}
"""


def write(path, text):
    """Replace the file as a careful tool does: never half-written."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def one_key(key, tenant="t"):
    return yaml.safe_dump([{"key": key, "tenant": tenant}])


def test_a_file_gives_keys_their_tenants_quotas_and_expiry():
    ring = KeyRing(parse_keys(GOOD, "keys.yaml"), clock=lambda: 1_700_000_000.0)
    assert ring.tenant_of("sk-plain") == Tenant("team-a", Quota(60, 1000, 4))
    assert ring.tenant_of("sk-second") is ring.tenant_of("sk-plain"), "keys of a tenant share its quotas"
    assert ring.tenant_of("sk-hashed") == Tenant("team-b")
    assert [tenant.name for tenant in ring.tenants] == ["team-a", "team-b"]


def test_one_key_of_a_tenant_may_see_all_and_the_others_not():
    text = "- {key: a, tenant: t, admin: true}\n- {key: b, tenant: t, admin: false}\n- {key: c, tenant: t}"
    ring = KeyRing(parse_keys(text, "keys.yaml"))
    assert [ring.tenant_of(key).sees_all for key in "abc"] == [True, False, False]
    assert [tenant.name for tenant in ring.tenants] == ["t"]


def test_json_is_read_as_well_with_tabs_and_nulls():
    entries = [{"key": "sk-1", "tenant": "a", "max_concurrent": 2, "expires": None}]
    (entry,) = parse_keys(json.dumps(entries, indent="\t"), "keys.json")
    assert (entry.digest, entry.tenant.quota.max_concurrent, entry.expires) == (hash_key("sk-1"), 2, None)


def test_a_key_ends_at_its_expiry_and_the_refusal_says_so():
    now = [1_801_393_199.9]  # 2027-01-31T10:59:59.9Z
    ring = KeyRing(parse_keys(GOOD, "keys.yaml"), clock=lambda: now[0])
    assert ring.tenant_of("sk-hashed").name == "team-b"
    now[0] += 0.1
    with pytest.raises(ApiError, match="expired at 2027-01-31T11:00:00") as refused:
        ring.tenant_of("sk-hashed")
    assert (refused.value.status, refused.value.retryable) == (401, False)


@pytest.mark.parametrize(
    "key", ["", "sk-plai", "sk-plainx", "SK-PLAIN", "sk-plain\udcff", hash_key("sk-plain").hex()]
)
def test_nothing_but_the_key_itself_is_taken(key):
    with pytest.raises(ApiError) as refused:
        KeyRing(parse_keys(GOOD, "keys.yaml")).tenant_of(key)
    assert refused.value.status == 401


def test_keys_are_held_as_hashes_alone():
    ring = KeyRing(parse_keys(GOOD, "keys.yaml"))
    assert "sk-plain" not in repr(vars(ring))


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "must be a list"),
        ("[]", 1, "must be a list"),
        ("keys: []", 1, "must be a list"),
        ("- key: [", 1, "no valid YAML"),
        ("- key: a\n  tenant: x\n  : :\n -", 3, "no valid YAML"),
        ("- hello", 1, "must be a key such as"),
        ("- tenant: a", 1, "needs either key or key_sha256"),
        ("- {key: a, key_sha256: b, tenant: a}", 1, "needs either"),
        ("- key: a", 1, "tenant is missing"),
        ("- key: a\n  tenant: a b", 2, "tenant must be 1 to 64 letters"),
        ("- key: a\n  tenant: a\n  tenent: b", 3, "did you mean tenant"),
        ("- key: a\n  tenant: a\n  key: b", 3, "key stands there twice"),
        ("- key: a\n  tenant: a\n- key: a\n  tenant: b", 3, "the same key stands in line 1"),
        ("- key: a b\n  tenant: a", 1, "key must be 1 to 512 printable"),
        ("- tenant: a\n  key_sha256: abc", 2, "key_sha256 must be the 64 hex digits"),
        ("- key: a\n  tenant: a\n  expires: tomorrow", 3, "expires must be an ISO date-time"),
        ("- key: a\n  tenant: a\n  expires: 2027-01-31", 3, "expires must be an ISO date-time"),
        ("- key: a\n  tenant: a\n  requests_per_minute: 0", 3, "requests_per_minute must be a whole number"),
        ("- key: a\n  tenant: a\n  tokens_per_minute: -5", 3, "tokens_per_minute must be"),
        ("- key: a\n  tenant: a\n  max_concurrent: 1.5", 3, "max_concurrent must be"),
        ("- key: a\n  tenant: a\n  max_concurrent: [1]", 3, "max_concurrent must be one value"),
        ("- key: a\n  tenant: a\n  admin: sure", 3, "admin must be true or false"),
        (
            "- {key: a, tenant: a, max_concurrent: 1}\n- key: b\n  tenant: a\n  max_concurrent: 2",
            4,
            "max_concurrent of tenant a is 1 above",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_its_line(text, line, says):
    with pytest.raises(ConfigError) as wrong:
        parse_keys(text, "keys.yaml")
    assert str(wrong.value).startswith(f"keys.yaml, line {line}: ")
    assert says in str(wrong.value)
    assert wrong.value.flag == "api_key_file"


def test_a_key_in_the_wrong_place_is_not_told():
    with pytest.raises(ConfigError) as wrong:
        parse_keys("- sk-very-secret: team-a\n", "keys.yaml")
    assert "secret" not in str(wrong.value)


@pytest.mark.parametrize(
    ("value", "key"),
    [("Bearer k", "k"), ("bearer  k ", "k"), ("Basic k", ""), ("k", ""), ("", ""), ("Bearer", "")],
)
def test_the_key_is_the_bearer_token(value, key):
    assert bearer_key(value) == key


def test_new_keys_are_long_and_never_alike():
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert min(map(len, made)) >= 50


def test_settings_give_keys_only_where_there_are_any(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(one_key("sk-file", "team-a"))
    assert keys_for(None, None) is None
    assert isinstance(keys_for("sk-flag", None), FixedKeys)
    both = keys_for("sk-flag", str(path)).ring
    assert [both.tenant_of(key).name for key in ("sk-flag", "sk-file")] == [DEFAULT_TENANT, "team-a"]
    with pytest.raises(ConfigError, match="No such file"):
        keys_for(None, str(tmp_path / "none.yaml"))


def test_a_changed_file_counts_once_it_has_settled(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(one_key("sk-old"))
    keys = KeyFile(path)
    assert not keys.poll()
    path.write_text(one_key("sk-newer"))
    assert not keys.poll(), "it may be half-written"
    assert keys.poll()
    assert keys.ring.tenant_of("sk-newer").name == "t"
    with pytest.raises(ApiError):
        keys.ring.tenant_of("sk-old")
    assert not keys.poll()


def test_a_file_that_is_still_written_is_not_believed(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(one_key("sk-1") + one_key("sk-2"))
    keys = KeyFile(path)
    path.write_text("")
    with path.open("a") as file:
        for line in (one_key("sk-1"), one_key("sk-2"), one_key("sk-3")):
            file.write(line)
            file.flush()
            assert not keys.poll()
            assert keys.ring.tenant_of("sk-2")
    assert keys.poll()
    assert len(keys.ring) == 3


@pytest.mark.parametrize("damage", ["wrong", "gone", "binary"])
def test_a_broken_file_keeps_the_old_keys_and_is_logged_once(tmp_path, caplog, damage):
    path = tmp_path / "keys.yaml"
    path.write_text(one_key("sk-old"))
    keys = KeyFile(path)
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"- key: sk-new\n  tenant: t\n  expires: never\n" if damage == "wrong" else b"\xff\xfe\xfd")
    with caplog.at_level(logging.INFO):
        assert [keys.poll() for _ in range(5)] == [False] * 5
    assert keys.ring.tenant_of("sk-old")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "keys.yaml, line 3: expires" in record.message if damage == "wrong" else "keys.yaml: " in record.message
    assert "sk-" not in record.message
    write(path, one_key("sk-mended"))
    assert [keys.poll() for _ in range(2)] == [False, True]
    assert keys.ring.tenant_of("sk-mended")


async def test_watching_goes_on_after_a_fault_of_any_kind(tmp_path, monkeypatch):
    path = tmp_path / "keys.yaml"
    path.write_text(one_key("sk-old"))
    keys = KeyFile(path, poll_seconds=0.001)
    faults, good = threading.Event(), threading.Event()
    real = keys.poll

    def poll():
        if not faults.is_set():
            faults.set()
            raise RuntimeError("a bug")
        if real():
            good.set()

    monkeypatch.setattr(keys, "poll", poll)
    watcher = asyncio.create_task(keys.watch())
    await asyncio.to_thread(faults.wait, 10)
    write(path, one_key("sk-new"))
    assert await asyncio.to_thread(good.wait, 10)
    watcher.cancel()
    assert keys.ring.tenant_of("sk-new")


async def test_keys_rotate_under_load_without_a_false_401(tmp_path):
    """Old key, both keys, new key: requests with a key that is in every version since they began are let in."""
    import httpx

    from cluster.admission.tenants import Tenancy

    model = served_model(tmp_path)
    path = tmp_path / "keys.yaml"
    path.write_text(one_key("sk-always") + one_key("sk-0"))
    source = saying(model, "ok")
    keys = KeyFile(path, poll_seconds=0.002)
    app = app_for(source, model, tenancy=Tenancy(keys))
    statuses, stop = [], asyncio.Event()

    async def ask(client):
        while not stop.is_set():
            statuses.append(
                (await client.get("/v1/models", headers={"authorization": "Bearer sk-always"})).status_code
            )

    # The load has its own client: in a pool that is never idle, httpcore can pass over one request for minutes.
    async with (
        serving(app) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as busy,
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
    ):
        load = [asyncio.create_task(ask(busy)) for _ in range(8)]
        for turn in range(1, 9):
            before = keys.ring
            text = one_key(f"sk-{turn}") + one_key("sk-always")
            (write if turn % 2 else lambda p, t: p.write_text(t))(path, text)
            while keys.ring is before:
                await asyncio.sleep(0.001)
            new = await client.get("/v1/models", headers={"authorization": f"Bearer sk-{turn}"})
            old = await client.get("/v1/models", headers={"authorization": f"Bearer sk-{turn - 1}"})
            assert (new.status_code, old.status_code) == (200, 401)
        stop.set()
        await asyncio.gather(*load)
    assert len(statuses) > 50
    assert set(statuses) == {200}


def squadron(*args):
    code = "from deploy.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_command_makes_a_key_and_an_entry_that_the_file_takes():
    made = squadron(
        "keys", "new", "--tenant", "team-a", "--max-concurrent", "3", "--expires", "2999-01-01T00:00:00Z", "--admin"
    )
    key = made.stderr.split()[-1]
    ring = KeyRing(parse_keys(made.stdout, "keys.yaml"))
    assert ring.tenant_of(key) == Tenant("team-a", Quota(max_concurrent=3), sees_all=True)
    assert key not in made.stdout


def test_a_key_that_goes_into_a_file_is_its_owners_alone_and_not_shown(tmp_path):
    path = tmp_path / "probe-key"
    made = squadron("keys", "new", "--tenant", "probe", "--scrape", "--save-key", str(path))
    assert (made.returncode, made.stderr) == (0, "")
    assert KeyRing(parse_keys(made.stdout, "keys.yaml")).tenant_of(path.read_text()).name == "probe"
    assert path.stat().st_mode & 0o777 == 0o600
    key = path.read_text()
    again = squadron("keys", "new", "--tenant", "probe", "--save-key", str(path))
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr == f"Error: --save-key: {path} is there already; give a new file\n"
    assert path.read_text() == key
    nowhere = squadron("keys", "new", "--tenant", "probe", "--save-key", str(tmp_path / "no" / "key"))
    assert "cannot be written: No such file or directory" in nowhere.stderr


def test_the_command_refuses_what_the_file_would():
    wrong = squadron("keys", "new", "--tenant", "team a")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.startswith("Error: --tenant must be 1 to 64 letters")


def test_serving_with_a_wrong_key_file_is_refused_before_anything_starts(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("- key: a\n")
    refused = squadron("serve", "demo", "--api-key-file", str(path))
    assert (refused.returncode, refused.stderr) == (1, f"Error: {path}, line 1: tenant is missing\n")


def test_the_same_key_in_file_and_flag_follows_the_file():
    ring = KeyRing([KeyEntry(hash_key("k"), Tenant("a")), KeyEntry(hash_key("k"), Tenant("b"))])
    assert ring.tenant_of("k").name == "b"
