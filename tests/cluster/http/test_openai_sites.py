"""What a page of another site has its visitor's browser send to a server without keys, and what others send."""

from functools import cache

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from cluster.admission.keys import FixedKeys
from cluster.admission.tenants import Tenancy
from cluster.errors import ApiError
from cluster.http.sites import Sites
from tests.openai_app import MODEL, app_for, client_for, saying, served_model, serving

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 5}
EVIL = "https://evil.example"
NETWORK = Sites(listens="0.0.0.0")
CROSS, SAME = {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-origin"}
# What every browser sends of a page's request, and where it leaves something out, what is left.
PAGES_OF_OTHERS = {
    "a script's post": {"origin": EVIL},
    "a script's post, told by the browser": {"origin": EVIL, **CROSS, "sec-fetch-mode": "no-cors"},
    "a form's post": {"origin": "null", **CROSS, "sec-fetch-mode": "navigate"},
    "a post of a page without a site": {"origin": "null"},
    "an image": CROSS,
    "a page of a sister site": {"origin": "http://other.localhost.example", "sec-fetch-site": "same-site"},
    "a page behind a name that leads here": {"host": "evil.example:8000", "origin": "http://evil.example:8000"},
    "what such a page reads": {"host": "evil.example:8000"},
    "a site that is almost ours": {"origin": "http://localhost.evil.example"},
    "a site with our name before its own": {"origin": "http://localhost@evil.example"},
    "a site that is none": {"origin": "http://["},
}
OWN = {
    "a program": {},
    "an SDK by address": {"host": "127.0.0.1:8000"},
    "an SDK by an address of IPv6": {"host": "[::1]:8000"},
    "the server's own page": {"origin": "http://localhost", **SAME},
    "its page behind a proxy that renames it": {"origin": "https://llm.example.com", **SAME},
    "its page in an older browser": {"origin": "http://localhost:80"},
    "an address that was typed": {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
    "a page of this machine": {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
    "one that calls it by its address": {"origin": "http://127.0.0.1:5173", **CROSS},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ask(model):
    """Asks with a good body; gives the answer, and what the source got for it."""
    source = saying(model, "ok")

    @cache
    def app_of(sites, keys):
        return app_for(source, model, sites=sites, tenancy=Tenancy(None if keys is None else FixedKeys.one(keys)))

    async def asked(headers, sites=None, method="POST", path="/v1/completions", keys=None):
        source.requests.clear()
        async with client_for(app_of(sites, keys)) as client:
            body = BODY if method == "POST" else None
            return await client.request(method, path, json=body, headers=headers), source.requests

    return asked


@pytest.mark.parametrize("case", PAGES_OF_OTHERS)
@pytest.mark.parametrize("listens", ["127.0.0.1", "0.0.0.0", "localhost"])
async def test_pages_of_other_sites_are_refused_without_keys(ask, case, listens):
    answer, requests = await ask(PAGES_OF_OTHERS[case], Sites(listens=listens))
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] in ("forbidden_origin", "forbidden_host")
    assert not requests
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("case", PAGES_OF_OTHERS)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/files"), ("GET", "/v1/files"), ("DELETE", "/v1/files/file-1"), ("GET", "/metrics"), ("GET", "/x")],
)
async def test_nor_may_they_use_other_routes(ask, case, method, path):
    answer, _ = await ask(PAGES_OF_OTHERS[case], method=method, path=path)
    assert answer.status_code == 403


@pytest.mark.parametrize("case", OWN)
async def test_programs_and_own_pages_are_served(ask, case):
    answer, requests = await ask(OWN[case])
    assert answer.status_code == 200, answer.text
    assert len(requests) == 1


@pytest.mark.parametrize("case", PAGES_OF_OTHERS | OWN)
async def test_with_keys_the_key_alone_decides(ask, case):
    headers = (PAGES_OF_OTHERS | OWN)[case]
    answer, _ = await ask(headers | {"authorization": "Bearer sk-1"}, keys="sk-1")
    refused, _ = await ask(headers, keys="sk-1")
    assert (answer.status_code, refused.status_code) == (200, 401)


@pytest.mark.parametrize("case", ["an image", "a page behind a name that leads here"])
async def test_health_which_tells_nothing_is_open_to_all(ask, case):
    answer, _ = await ask(PAGES_OF_OTHERS[case], method="GET", path="/health")
    assert answer.status_code == 200


async def test_links_of_other_sites_lead_to_the_page(ask):
    followed = {**CROSS, "sec-fetch-mode": "navigate"}
    assert (await ask(followed, method="GET", path="/ui"))[0].status_code == 200
    for method, path, headers in (
        ("GET", "/ui", {**CROSS, "sec-fetch-mode": "no-cors"}),
        ("GET", "/v1/models", followed),
        ("POST", "/v1/completions", followed),
        ("GET", "/ui", {**followed, "host": "evil.example"}),
    ):
        assert (await ask(headers, method=method, path=path))[0].status_code == 403, (method, path, headers)


@pytest.mark.parametrize(
    ("listens", "host", "served"),
    [
        ("127.0.0.1", "localhost:8000", True),
        ("127.0.0.1", "llm.localhost", True),
        ("127.0.0.1", "10.1.2.3:8000", True),
        ("127.0.0.1", "LOCALHOST.", True),
        ("127.0.0.1", "localhost:", True),
        ("127.0.0.1", "gpu-box", False),  # a neighbour in the network may answer to any such name
        ("127.0.0.1", "gpu-box.local", False),
        ("127.0.0.1", "llm.example.com", False),
        ("0.0.0.0", "localhost", True),
        ("0.0.0.0", "[fd00::7]:8000", True),
        ("0.0.0.0", "gpu-box:8000", True),
        ("0.0.0.0", "gpu-box.local", True),
        ("0.0.0.0", "llm-serve-svc.team.svc.cluster.local:8000", True),
        ("::", "llm-serve-svc.team.svc", True),
        ("0.0.0.0", "ip-10-0-0-1.ec2.internal", True),
        ("0.0.0.0", "llm.example.com", False),
        ("0.0.0.0", "local", True),
        ("0.0.0.0", "evil.notlocal", False),
        ("0.0.0.0", "", False),
        ("0.0.0.0", "a b", False),
        ("llm.example.com", "LLM.example.com:8000", True),
        ("llm.example.com", "other.example.com", False),
        ("llm.example.com", "10.1.2.3", True),
    ],
)
async def test_a_server_goes_by_addresses_and_by_names_that_no_stranger_gives(ask, listens, host, served):
    answer, _ = await ask({"host": host}, Sites(listens=listens))
    assert answer.status_code == (200 if served else 403), answer.text
    if not served:
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("forbidden_host", None)
        assert "--allowed-hosts" in error["message"]


async def test_a_server_goes_by_its_machines_name(ask, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Node7.corp.example.com")
    host = {"host": "node7.corp.example.com:8000"}
    assert (await ask(host, NETWORK))[0].status_code == 200
    assert (await ask(host))[0].status_code == 403


@pytest.mark.parametrize(
    ("hosts", "host", "served"),
    [
        (("llm.example.com",), "llm.example.com", True),
        (("llm.example.com",), "a.llm.example.com", False),
        (("*.example.com",), "a.llm.example.com", True),
        (("*.example.com",), "example.com", False),
        (("*.example.com",), "badexample.com", False),
        (("*",), "evil.example", True),
        (("llm.example.com",), "localhost", True),
    ],
)
@pytest.mark.parametrize("keys", [None, "sk-1"])
async def test_allowed_hosts_are_names_beside_the_usual_ones_and_hold_with_keys_too(ask, hosts, host, served, keys):
    sites = Sites(keyed=keys is not None, hosts=hosts)
    answer, _ = await ask({"host": host, "authorization": "Bearer sk-1"}, sites, keys=keys)
    assert answer.status_code == (200 if served else 403)


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


@pytest.mark.parametrize(
    ("keyed", "origins", "origin", "told"),
    [
        (False, None, EVIL, None),
        (False, None, "http://localhost:3000", "http://localhost:3000"),
        (False, None, "http://[::1]:3000", "http://[::1]:3000"),
        (False, (EVIL,), EVIL, EVIL),
        (False, (EVIL,), "http://localhost:3000", None),
        (False, ("null",), "null", "null"),
        (False, ("*",), EVIL, "*"),
        (True, None, EVIL, "*"),
        (True, ("https://chat.example.com",), EVIL, None),
        (True, ("https://chat.example.com",), "https://chat.example.com", "https://chat.example.com"),
    ],
)
async def test_who_may_send_may_ask_first_and_read_the_answer(ask, keyed, origins, origin, told):
    sites = Sites(keyed=keyed, origins=origins)
    headers = {"origin": origin, **CROSS}
    keys = {"authorization": "Bearer sk-1"}
    answer, _ = await ask(headers | keys, sites, keys="sk-1" if keyed else None)
    first, _ = await ask(headers | PREFLIGHT, sites, method="OPTIONS", keys="sk-1" if keyed else None)
    assert (answer.status_code, first.status_code) == ((403, 403) if told is None else (200, 204))
    assert [one.headers.get("access-control-allow-origin") for one in (answer, first)] == [told, told]
    assert ("vary" in answer.headers) == (told not in (None, "*")), "caches must keep such answers apart"
    if told is None:
        assert "--allowed-origins" in answer.json()["error"]["message"]


async def test_where_any_site_may_nothing_is_asked_of_a_request(ask):
    answer, _ = await ask(PAGES_OF_OTHERS["an image"], Sites(origins=("*",)), method="GET", path="/v1/models")
    assert answer.status_code == 200


async def post(url, headers, content):
    """As a browser or another program sends it, with no header that was not asked for."""
    async with httpx.AsyncClient(trust_env=False) as client:
        request = client.build_request("POST", url, content=content, headers=headers)
        return await client.send(request)


BROWSERS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x")


@pytest.mark.parametrize("kind", [None, *BROWSERS])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/tokenize"])
async def test_what_browsers_send_without_asking_is_no_json(model, kind, path):
    async with serving(app_for(saying(model, "ok"), model)) as url:
        body = b'{"model": "demo", "prompt": "x", "max_tokens": 2}'
        answer = await post(f"{url}{path}", {} if kind is None else {"content-type": kind}, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


async def test_a_body_of_no_known_length_needs_a_type_too(model):
    async def parts():
        yield b'{"model": "demo", "prompt": "x"}'

    async with serving(app_for(saying(model, "ok"), model)) as url:
        answer = await post(f"{url}/v1/completions", {}, parts())
    assert answer.status_code == 415
    assert "Content-Type" in answer.json()["error"]["message"]


async def test_a_program_with_a_key_may_leave_the_type_out(model):
    async with serving(app_for(saying(model, "ok"), model, api_key="k")) as url:
        body = b'{"model": "demo", "prompt": "x", "max_tokens": 2}'
        answer = await post(f"{url}/v1/completions", {"authorization": "Bearer k"}, body)
    assert answer.status_code == 200


@given(
    host=st.none() | st.text(st.characters(codec="latin-1"), max_size=40),
    origin=st.none() | st.text(st.characters(codec="latin-1"), max_size=40),
    site=st.none() | st.sampled_from(["cross-site", "same-site", ""]) | st.text(max_size=5),
    listens=st.sampled_from(["127.0.0.1", "0.0.0.0", "llm.example.com"]),
)
def test_no_spelling_raises_anything_but_a_refusal_nor_makes_a_stranger_ours(host, origin, site, listens):
    given = {"host": host, "origin": origin, "sec-fetch-site": site}
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in given.items() if value is not None]
    stranger = [(b"origin", EVIL.encode()), *[one for one in raw if one[0] == b"host"]]
    sites = Sites(listens=listens)
    for headers in (raw, stranger):
        try:
            sites.check({"method": "POST"}, Headers(raw=headers))
        except ApiError as error:
            assert error.status == 403
        else:
            assert headers is raw
            assert site is None or site in ("same-origin", "none") or sites.lets_in(origin or "")
