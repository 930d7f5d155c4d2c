"""`/v1/files`: through OpenAI's client, and through what no client of theirs would send."""

from __future__ import annotations

import asyncio
import errno
import threading
import tracemalloc
from itertools import repeat

import httpx
import openai
import pytest

from cluster.batch.server.root import LocalDraft
from cluster.errors import ApiError
from cluster.http import asgi as openai_http
from cluster.http.multipart import UploadForm
from cluster.http.storage import UnderWay
from tests.openai_app import app_for, client_for, saying, served_model, serving
from tests.storage_app import (
    BATCH,
    BOUNDARY,
    FORM,
    LINES,
    form,
    part,
    storing_app,
    two_tenants,
    upload_form,
)

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def app(model, tmp_path):
    return storing_app(model, tmp_path)


async def error_of(answer):
    error = answer.json()["error"]
    assert error["request_id"] == answer.headers["x-request-id"]
    return answer.status_code, error["code"], error["param"]


def contents(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# --- OpenAI's client


async def test_openais_client_uploads_lists_fetches_and_deletes(app, tmp_path):
    path = tmp_path / "requests ü.jsonl"
    path.write_bytes(LINES)
    async with serving(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        file = await client.files.create(file=path, purpose="batch")
        assert (file.bytes, file.filename, file.purpose, file.object) == (len(LINES), path.name, "batch", "file")
        assert await client.files.retrieve(file.id) == file
        content = await client.files.content(file.id)
        assert content.content == LINES
        assert content.response.headers["content-type"] == "application/octet-stream"
        assert content.response.headers["x-content-type-options"] == "nosniff"
        assert "requests%20%C3%BC.jsonl" in content.response.headers["content-disposition"]
        others = [await client.files.create(file=("b", LINES), purpose="batch") for _ in range(4)]
        newest_first = [file, *others][::-1]
        assert [one async for one in client.files.list()] == newest_first
        assert [one async for one in client.files.list(limit=2)] == newest_first, "in three pages"
        assert [one async for one in client.files.list(limit=3, order="asc")] == newest_first[::-1]
        assert [one async for one in client.files.list(purpose="batch_output")] == []
        gone = await client.files.delete(file.id)
        assert (gone.id, gone.deleted, gone.object) == (file.id, True, "file")
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            await client.files.retrieve(file.id)
        assert [one async for one in client.files.list()] == newest_first[:-1]


def test_the_client_that_blocks_works_as_well(model, tmp_path):
    async def main():
        async with serving(storing_app(model, tmp_path)) as url:
            await asyncio.to_thread(use, url)

    def use(url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            file = client.files.create(file=LINES, purpose="batch")
            assert file.filename == "upload"
            assert client.files.content(file.id).read() == LINES
            assert [one.id for one in client.files.list()] == [file.id]

    asyncio.run(main())


async def test_refusals_name_what_works(app):
    async with serving(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'") as caught:
            await client.files.create(file=LINES, purpose="fine-tune")
        assert caught.value.param == "purpose"
        with pytest.raises(openai.BadRequestError, match=r"a whole number between 3600 .* and 2592000") as caught:
            after = {"anchor": "created_at", "seconds": 3599}
            await client.files.create(file=LINES, purpose="batch", expires_after=after)
        assert caught.value.param == "expires_after.seconds"
        with pytest.raises(openai.BadRequestError, match="file is empty"):
            await client.files.create(file=("empty", b""), purpose="batch")
        with pytest.raises(openai.APIStatusError, match=rf"larger than {MIB} bytes.*--max-file-bytes") as caught:
            await client.files.create(file=b"x" * (MIB + 1), purpose="batch")
        assert caught.value.status_code == 413
        for wrong in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}, {"purpose": "vision"}, {"after": "../x"}):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.files.list(**wrong)
            assert caught.value.param in wrong
        file = await client.files.create(file=b"x" * MIB, purpose="batch")
        assert file.bytes == MIB, "the limit itself is allowed"
        await client.batches.create(input_file_id=file.id, **BATCH)
        with pytest.raises(openai.ConflictError, match=r"used by batch batch_.*cancel it"):
            await client.files.delete(file.id)
        assert [one.id async for one in client.files.list()] == [file.id]


# --- forms


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
async def test_a_form_may_come_in_any_pieces_and_its_file_may_hold_anything(app, size):
    content = b"".join([b"\r\n--the-bound", b"\r\n--", b"--the-boundary--", bytes(range(256)), b"\r", b"\n\r\n"]) * 3
    body = upload_form(content)

    async def pieces():
        for start in range(0, len(body), size):
            yield body[start : start + size]

    async with client_for(app) as client:
        made = await client.post("/v1/files", content=pieces(), headers=FORM)
        assert made.status_code == 200, made.text
        assert (await client.get(f"/v1/files/{made.json()['id']}/content")).content == content


async def test_parts_may_come_in_either_order(app):
    body = form(part("file", LINES, '; filename="x"', "Content-Type: text/plain\r\n"), part("purpose", b"batch"))
    async with client_for(app) as client:
        assert (await client.post("/v1/files", content=body, headers=FORM)).status_code == 200


FILE = part("file", LINES, '; filename="x"')
PURPOSE = part("purpose", b"batch")
WRONG_FORMS = {
    "empty": (b"", "invalid_multipart", None),
    "no form": (b'{"purpose": "batch"}', "invalid_multipart", None),
    "no end": (form(PURPOSE, FILE, end=b""), "invalid_multipart", None),
    "end cut": (form(PURPOSE, FILE)[:-4], "invalid_multipart", None),
    "another boundary": (form(PURPOSE, FILE).replace(b"the-b", b"a-b"), "invalid_multipart", None),
    "no parts": (form(), "missing_required_parameter", "file"),
    "no file": (form(PURPOSE), "missing_required_parameter", "file"),
    "no purpose": (form(FILE), "missing_required_parameter", "purpose"),
    "file as text": (form(PURPOSE, part("file", LINES)), "invalid_value", "file"),
    "empty file": (form(PURPOSE, part("file", b"", '; filename="x"')), "invalid_value", "file"),
    "file twice": (form(PURPOSE, FILE, FILE), "invalid_value", "file"),
    "purpose twice": (form(PURPOSE, PURPOSE, FILE), "invalid_value", "purpose"),
    "other purpose": (form(part("purpose", b"vision"), FILE), "invalid_type", "purpose"),
    "unknown part": (form(PURPOSE, part("porpose", b"batch"), FILE), "unknown_parameter", "porpose"),
    "purpose as a list": (form(part("purpose[0]", b"batch"), FILE), "unknown_parameter", "purpose[0]"),
    "file as a list": (form(PURPOSE, part("file[]", b"x"), FILE), "unknown_parameter", "file[]"),
    "long part": (form(part("purpose", b"b" * 5000), FILE), "invalid_value", "purpose"),
    "long name": (form(part("n" * 20_000, b"b"), FILE), "invalid_multipart", None),
    "no name": (form(b"Content-Disposition: form-data\r\n\r\nx"), "invalid_multipart", None),
    "no disposition": (form(b"Content-Type: text/plain\r\n\r\nx"), "invalid_multipart", None),
    "no headers": (form(b"\r\nx"), "invalid_multipart", None),
    "bad header": (form(b"Content Disposition: form-data\r\n\r\nx"), "invalid_multipart", None),
    "many headers": (form(b"A: b\r\n" * 100 + b"\r\nx"), "invalid_multipart", None),
    "purpose no UTF-8": (form(part("purpose", b"\xff"), FILE), "invalid_multipart", None),
    "filename no UTF-8": (form(PURPOSE, FILE).replace(b'"x"', b'"\xff"'), "invalid_multipart", None),
    "no filename": (form(PURPOSE, part("file", LINES, '; filename=""')), "invalid_value", "file"),
    "long filename": (form(PURPOSE, part("file", LINES, f'; filename="{"n" * 256}"')), "invalid_value", "file"),
    "odd filename": (form(PURPOSE, part("file", LINES, '; filename="a\x1bb"')), "invalid_value", "file"),
    "base64": (
        form(PURPOSE, part("file", LINES, '; filename="x"', "Content-Transfer-Encoding: base64\r\n")),
        "invalid_multipart",
        None,
    ),
}


@pytest.mark.parametrize("name", WRONG_FORMS)
async def test_a_wrong_form_gets_a_typed_400_and_leaves_nothing(app, tmp_path, name):
    body, code, param = WRONG_FORMS[name]
    async with client_for(app) as client:
        answer = await client.post("/v1/files", content=body, headers=FORM)
    assert await error_of(answer) == (400, code, param), answer.text
    assert contents(tmp_path) == []


def test_a_form_has_few_parts():
    seen = []
    form_of_many = UploadForm(BOUNDARY.encode(), lambda: None, lambda fields: seen.append(len(fields)), 1)
    with pytest.raises(ApiError, match="at most 16 parts"):
        form_of_many.feed(form(*[part(f"f{number}", b"x") for number in range(17)]))
    assert seen == list(range(1, 17))


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 415),
        ("multipart/mixed; boundary=x", 415),
        ("", 415),
        ("multipart/form-data", 400),
        ("multipart/form-data; boundary=", 400),
        (f"multipart/form-data; boundary={'x' * 71}", 400),
        ("multipart/form-data; boundary*=utf-8''x", 400),
    ],
)
async def test_a_wrong_content_type_is_told_so(app, kind, status):
    async with client_for(app) as client:
        answer = await client.post("/v1/files", content=upload_form(), headers={"content-type": kind})
        packed = await client.post("/v1/files", content=upload_form(), headers=FORM | {"content-encoding": "gzip"})
    code = "unsupported_media_type" if status == 415 else "invalid_multipart"
    assert await error_of(answer) == (status, code, None)
    assert await error_of(packed) == (415, "unsupported_media_type", None)


@pytest.mark.parametrize("name", ["../../../etc/passwd", "C:\\x", "/etc/passwd", "a;b\\'", "ü.jsonl", "x" * 255])
async def test_a_filename_is_a_label_and_no_path(app, tmp_path, name):
    async with client_for(app) as client:
        made = await client.post("/v1/files", content=upload_form(filename=name), headers=FORM)
        assert made.status_code == 200, made.text
        content = await client.get(f"/v1/files/{made.json()['id']}/content")
    assert content.headers["content-disposition"].isascii()
    assert content.content == LINES
    assert contents(tmp_path) == ["content", "meta.json"]
    assert made.json()["filename"] == ("x" if name.startswith("C:") else name)


# --- bounds


async def raw(app, body, headers, method="POST", path="/v1/files"):
    """Call the app without a client in between. Returns the status, and how many parts of the body were taken."""
    taken, sent, parts = 0, [], iter(body)

    async def receive():
        nonlocal taken
        part = next(parts, None)
        if part is None:
            await asyncio.Event().wait()
        taken += 1
        return part if isinstance(part, dict) else {"type": "http.request", "body": part, "more_body": True}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "root_path": "", "headers": headers}
    await app(scope | {"asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}, receive, send)
    return (sent[0]["status"] if sent else None), taken


RAW_FORM = [(name.encode(), value.encode()) for name, value in FORM.items()]
HEAD = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'.encode()
TAIL = b"\r\n" + form(PURPOSE)


async def test_thirty_megabytes_pass_in_little_memory(model, tmp_path):
    app = storing_app(model, tmp_path, max_file_bytes=64 * MIB)
    block = b'{"custom_id": "x"}\r\n' * 3277  # 64 KiB
    count = 30 * MIB // len(block)
    last = {"type": "http.request", "body": TAIL, "more_body": False}
    tracemalloc.start()
    try:
        status, _ = await raw(app, [HEAD, *repeat(block, count), last], RAW_FORM)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert status == 200
    assert peak < 4 * MIB
    async with client_for(app) as client:
        (file,) = (await client.get("/v1/files")).json()["data"]
    assert file["bytes"] == count * len(block)


async def test_a_download_takes_little_memory(model, tmp_path):
    app = storing_app(model, tmp_path, max_file_bytes=64 * MIB)
    async with client_for(app) as client:
        made = await client.post("/v1/files", content=upload_form(b"x" * (30 * MIB)), headers=FORM)
    tracemalloc.start()
    received, whole = [], asyncio.Event()

    async def receive():
        await whole.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        received.append(len(message.get("body", b"")))
        if message["type"] == "http.response.body" and not message.get("more_body"):
            whole.set()

    try:
        path = f"/v1/files/{made.json()['id']}/content"
        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "root_path": "", "headers": []}
        await app(scope | {"asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}, receive, send)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(received) == 30 * MIB
    assert peak < 4 * MIB


async def test_what_is_too_large_is_refused_before_it_is_taken(app, tmp_path):
    declared = [*RAW_FORM, (b"content-length", str(3 * MIB).encode())]
    assert await raw(app, [HEAD], declared) == (413, 0)
    status, taken = await raw(app, [HEAD, *repeat(b"x" * 65_536, 1000)], RAW_FORM)
    assert (status, taken) < (413, 25)
    status, taken = await raw(app, repeat(b"\r\n" * 32_768, 1000), RAW_FORM)  # before the first part
    assert (status, taken) < (413, 25)
    status, taken = await raw(app, [form(PURPOSE), *repeat(b"x" * 65_536, 1000)], RAW_FORM)  # after the last
    assert (status, taken) < (413, 25)
    assert contents(tmp_path) == []


async def test_an_upload_that_breaks_off_leaves_nothing(app, tmp_path):
    gone = {"type": "http.disconnect"}
    assert await raw(app, [HEAD, *repeat(b"x" * 65_536, 9), gone], RAW_FORM) == (None, 11)
    assert contents(tmp_path) == []
    task = asyncio.create_task(raw(app, [HEAD, *repeat(b"x" * 65_536, 9)], RAW_FORM))
    while not contents(tmp_path):
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert contents(tmp_path) == []


async def test_a_client_that_leaves_while_the_disk_writes_leaves_nothing(app, tmp_path, monkeypatch):
    writing, go = asyncio.Event(), threading.Event()
    loop, write = asyncio.get_running_loop(), LocalDraft.write

    def slow(draft, data):
        loop.call_soon_threadsafe(writing.set)
        assert go.wait(30)
        return write(draft, data)

    monkeypatch.setattr(LocalDraft, "write", slow)
    task = asyncio.create_task(raw(app, [HEAD, *repeat(b"x" * 65_536, 9)], RAW_FORM))
    await writing.wait()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done(), "the file is still being written to"
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert contents(tmp_path) == []


async def test_a_body_that_does_not_come_ends_in_time(app, tmp_path, monkeypatch):
    late = [*RAW_FORM, (b"x-request-timeout-seconds", b"0.3")]
    assert (await raw(app, [HEAD], late))[0] == 504
    monkeypatch.setattr(openai_http, "BODY_TIMEOUT", 0.05)
    assert (await raw(app, [HEAD], RAW_FORM))[0] == 408
    assert contents(tmp_path) == []


async def test_a_full_disk_is_told_and_leaves_nothing(app, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("cluster.batch.server.root.os.fsync", full)
    async with client_for(app) as client:
        answer = await client.post("/v1/files", content=upload_form(), headers=FORM)
        assert await error_of(answer) == (507, "out_of_storage", None)
        assert contents(tmp_path) == []
        monkeypatch.undo()
        assert (await client.post("/v1/files", content=upload_form(), headers=FORM)).status_code == 200


async def test_a_place_that_is_gone_is_no_inside_error_and_tells_no_path(app, tmp_path):
    (tmp_path / "files").write_text("in the way")
    async with client_for(app) as client:
        answer = await client.post("/v1/files", content=upload_form(), headers=FORM)
        listing = await client.get("/v1/files")
    for one in (answer, listing):
        assert await error_of(one) == (503, "storage_failed", None)
        assert str(tmp_path) not in one.text


# --- the door


async def test_tenants_see_their_own_and_need_a_key(model, tmp_path):
    app = storing_app(model, tmp_path, tenancy=two_tenants())
    mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("sk-a", "sk-b"))
    async with client_for(app) as client:
        assert (await client.post("/v1/files", content=upload_form(), headers=FORM)).status_code == 401
        made = (await client.post("/v1/files", content=upload_form(), headers=FORM | mine)).json()
        path = f"/v1/files/{made['id']}"
        for method, place in (("GET", path), ("GET", f"{path}/content"), ("DELETE", path)):
            assert (await client.request(method, place)).status_code == 401
            other = await client.request(method, place, headers=theirs)
            assert await error_of(other) == (404, "not_found", None)
        assert (await client.get("/v1/files", headers=theirs)).json()["data"] == []
        after = await client.get("/v1/files", params={"after": "file-" + "f" * 32}, headers=theirs)
        assert after.json()["data"] == []
        assert (await client.get("/v1/files", headers=mine)).json()["data"] == [made]


@pytest.mark.parametrize(
    "path",
    ["..%2F..%2Fetc%2Fpasswd", "%2e%2e", "file-%00", "x" * 3000, "file-" + "0" * 32, "file-" + "0" * 32 + "%0A", "ü"],
)
async def test_no_spelling_of_an_id_gets_anywhere(app, path):
    async with client_for(app) as client:
        for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
            answer = await client.request(method, f"http://localhost/v1/files/{path}{rest}")
            assert await error_of(answer) == (404, "not_found", None)
            assert len(answer.content) < 500


async def test_without_a_place_every_route_names_the_flag(model):
    app = app_for(saying(model, "ok"), model)
    calls = [
        ("GET", "files"),
        ("POST", "files"),
        ("GET", "files/x"),
        ("DELETE", "files/x"),
        ("GET", "files/x/content"),
    ]
    calls += [("GET", "batches"), ("POST", "batches"), ("GET", "batches/x"), ("POST", "batches/x/cancel")]
    async with client_for(app) as client:
        for method, path in calls:
            answer = await client.request(method, f"/v1/{path}")
            assert await error_of(answer) == (404, "batches_not_enabled", None)
            assert "--batch-dir" in answer.json()["error"]["message"]


async def test_other_methods_are_told_which_there_are(app):
    async with client_for(app) as client:
        answer = await client.put("/v1/files")
        assert await error_of(answer) == (405, "method_not_allowed", None)
        assert {"GET", "POST"} <= set(answer.headers["allow"].split(", "))
        head = await client.head("/v1/files")
        assert head.status_code == 200


async def test_the_head_of_a_content_is_its_length_without_reading_it(app, monkeypatch):
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        made = (await client.post("/v1/files", content=upload_form(), headers=FORM)).json()
        monkeypatch.setattr("cluster.http.batch_routes._blocks", lambda *_: pytest.fail("it was read"))
        head = await client.head(f"/v1/files/{made['id']}/content")
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(LINES)))


async def test_a_content_that_breaks_off_is_never_taken_for_whole(app, monkeypatch):
    async def torn(*_):
        yield b"half"
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr("cluster.http.batch_routes._blocks", torn)
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        made = (await client.post("/v1/files", content=upload_form(), headers=FORM)).json()
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(f"/v1/files/{made['id']}/content")
        assert (await client.get("/v1/files")).status_code == 200


async def test_what_goes_out_to_slow_clients_is_bounded(model, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.http.batch_routes.UnderWay", lambda: UnderWay(40 * MIB))
    app = storing_app(model, tmp_path, max_file_bytes=64 * MIB)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        large = await client.post("/v1/files", content=upload_form(b"x" * (30 * MIB)), headers=FORM)
        small = await client.post("/v1/files", content=upload_form(), headers=FORM)
        path, other = (f"/v1/files/{one.json()['id']}/content" for one in (large, small))
        async with client.stream("GET", path) as slow:
            assert slow.status_code == 200
            refused = await client.get(path)
            assert await error_of(refused) == (429, "overloaded", None)
            assert int(refused.headers["retry-after"]) >= 1
            assert (await client.get(other)).content == LINES, "there is room for it"
            assert len(await slow.aread()) == 30 * MIB
        assert len((await client.get(path)).content) == 30 * MIB
        async with client.stream("GET", path) as gone:
            assert gone.status_code == 200
        while (answer := await client.get(path)).status_code == 429:  # until the server has noticed
            await asyncio.sleep(0.01)
        assert len(answer.content) == 30 * MIB


async def test_what_is_larger_than_the_bound_goes_alone_and_takes_no_room_of_other_tenants():
    under_way = UnderWay(10)
    with under_way.sending("a", 50):
        with pytest.raises(ApiError, match="tenants share"), under_way.sending("a", 1):
            pass
        with under_way.sending("b", 5), pytest.raises(ApiError), under_way.sending("b", 1):
            pass
    with under_way.sending("a", 4), under_way.sending("a", 6), pytest.raises(ApiError), under_way.sending("a", 1):
        pass
    with under_way.sending("a", 10):
        pass
