"""What files of a tenant may take, and how long they are kept: in the store, and as OpenAI's client sees it."""

import threading
import time

import openai
import pytest

from cluster.admission.key_file import parse_keys
from cluster.admission.keys import FixedKeys, KeyRing
from cluster.admission.tenants import Tenancy
from cluster.batch.server.batch_runner import Sweeper
from cluster.batch.server.ids import PageQuery
from cluster.batch.server.root import open_root
from cluster.batch.server.store import NewBatch, Store
from cluster.errors import ApiError
from tests.cluster.batch.store_lab import NOW, URL, batch_of, keep, over, refused
from tests.openai_app import client_for, served_model, serving
from tests.storage_app import BATCH, BOUNDARY, FORM, LINES, form, part, storing_app, upload_form

FULL = ("storage_quota_exceeded", 413)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


def kept_within(store, size, most, tenant="a", **more):
    draft = store.files.draft()
    try:
        draft.write(b"x" * size)
        return store.keep_input(draft, tenant, "in.jsonl", most, **more)
    finally:
        draft.discard()


def names(store):
    return sorted(one.id for one in store.files.page("a", PageQuery(100)).items)


# --- the quota of bytes


def test_files_of_a_tenant_take_no_more_than_its_quota_and_deleting_one_makes_room(store, place):
    first = kept_within(store, 60, 100)
    with refused(*FULL):
        kept_within(store, 41, 100)
    other = kept_within(store, 90, 100, tenant="b")
    second = kept_within(store, 40, 100)
    again = Store(open_root(place), 1)  # another router
    with refused(*FULL):
        again.room_left("a", 100)
    store.delete_file(first.id, "a")
    assert again.room_left("a", 100) == 60
    assert store.room_left("b", 100) == 10
    assert names(store) == [second.id]
    assert store.files.get(other.id, "b") == other


def test_what_a_batch_leaves_counts_and_a_full_tenant_makes_no_new_batch(store):
    stored = keep(store, b"x" * 30)
    draft = store.files.draft()
    draft.write(b"x" * 70)
    store.files.add(draft, "a", "out.jsonl", "batch_output")
    with refused(*FULL):
        store.create_batch(NewBatch(stored.id, URL), "a", 100)
    assert list(store.batches.unended()) == []
    store.create_batch(NewBatch(stored.id, URL), "a", 101)


def test_a_tenant_has_so_many_files_and_no_more(store, monkeypatch):
    monkeypatch.setattr("cluster.batch.server.store.MOST_FILES", 2)
    first, _ = [kept_within(store, 1, None) for _ in range(2)]
    for act in (lambda: kept_within(store, 0, None), lambda: store.create_batch(NewBatch(first.id, URL), "a")):
        with pytest.raises(ApiError, match=r"2 files .*DELETE /v1/files/ID") as caught:
            act()
        assert (caught.value.code, caught.value.status) == FULL
    assert kept_within(store, 1, None, tenant="b").tenant == "b"
    store.delete_file(first.id, "a")
    kept_within(store, 1, None)


def test_uploads_that_meet_never_take_more_than_the_quota(tmp_path):
    places = [Store(open_root(str(tmp_path)), 1 << 20) for _ in range(6)]
    admission = threading.Barrier(len(places))

    def upload(store):
        admission.wait()
        for _ in range(5):
            try:
                kept_within(store, 30, 100)
            except ApiError as error:
                assert (error.code, error.status) == FULL

    threads = [threading.Thread(target=upload, args=(store,)) for store in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fresh = Store(open_root(str(tmp_path)), 1)
    assert fresh.files.stored_bytes("a") <= 100
    assert len(list((tmp_path / "files").iterdir())) == len(names(fresh))


def test_a_damaged_file_keeps_nobody_from_uploading(store):
    damaged = kept_within(store, 10, 100)
    store.root.write(f"files/{damaged.id}/meta.json", b"{")
    again = Store(store.root, 1)
    assert again.room_left("a", 100) == 100


async def test_a_client_over_its_quota_is_told_which_and_what_frees_room(model, tmp_path):
    keys = parse_keys("- {key: sk-a, tenant: a, max_stored_bytes: 300}\n- {key: sk-b, tenant: b}", "keys.yaml")
    app = storing_app(model, tmp_path, tenancy=Tenancy(FixedKeys(KeyRing(keys))))
    async with serving(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-a", max_retries=0) as client:
        file = await client.files.create(file=b"x" * 200, purpose="batch")
        for content in (b"x" * 101, b"x" * (1 << 18)):
            with pytest.raises(openai.APIStatusError, match=r"max_stored_bytes.*DELETE /v1/files/ID") as caught:
                await client.files.create(file=content, purpose="batch")
            assert (caught.value.status_code, caught.value.code) == (413, "storage_quota_exceeded")
            assert caught.value.body["retryable"] is False
        last = await client.files.create(file=b"x" * 100, purpose="batch")
        with pytest.raises(openai.APIStatusError, match="max_stored_bytes"):
            await client.batches.create(input_file_id=last.id, **BATCH)
        with pytest.raises(openai.APIStatusError, match="max_stored_bytes"):
            await client.files.create(file=b"x", purpose="batch")
        await client.files.delete(file.id)
        await client.batches.create(input_file_id=last.id, **BATCH)
        await client.files.create(file=b"x" * 200, purpose="batch")
        assert (await client.with_options(api_key="sk-b").files.create(file=b"x" * 999, purpose="batch")).bytes == 999
    assert list((tmp_path / "drafts").iterdir()) == []


# --- how long files are kept


async def test_a_file_tells_when_it_expires(model, tmp_path):
    app = storing_app(model, tmp_path)
    after = {"anchor": "created_at", "seconds": 7200}
    async with serving(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        file = await client.files.create(file=LINES, purpose="batch", expires_after=after)
        assert file.expires_at == file.created_at + 7200
        assert await client.files.retrieve(file.id) == file
        assert (await client.files.create(file=LINES, purpose="batch")).expires_at is None
        made = await client.batches.create(input_file_id=file.id, output_expires_after=after, **BATCH)
        assert "output_expires_after" not in made.model_extra
    assert Store(open_root(str(tmp_path)), 1).batches.read(made.id).output_expires_after == 7200


WRONG = [
    ({"seconds": "7200"}, "expires_after.anchor"),
    ({"anchor": "created_at"}, "expires_after.seconds"),
    ({"anchor": "created_at", "seconds": "2592001"}, "expires_after.seconds"),
    ({"anchor": "created_at", "seconds": "soon"}, "expires_after.seconds"),
    ({"anchor": "created_at", "seconds": "7200", "more": "1"}, "expires_after.more"),
]


@pytest.mark.parametrize(("given", "param"), WRONG)
@pytest.mark.parametrize("first", [True, False])
async def test_a_wrong_expiry_is_refused_by_name(model, tmp_path, given, param, first):
    parts = [part(f"expires_after[{name}]", value.encode()) for name, value in given.items()]
    file = part("file", LINES, '; filename="in.jsonl"')
    body = form(part("purpose", b"batch"), *([*parts, file] if first else [file, *parts]))
    async with client_for(storing_app(model, tmp_path)) as client:
        answer = await client.post("/v1/files", content=body, headers=FORM)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not (tmp_path / "files").exists()


async def test_an_upload_without_an_expiry_is_as_it_was(model, tmp_path):
    async with client_for(storing_app(model, tmp_path)) as client:
        answer = await client.post("/v1/files", content=upload_form(), headers=FORM)
        assert answer.json()["expires_at"] is None
    assert BOUNDARY.encode() not in next((tmp_path / "files").rglob("content")).read_bytes()


def test_files_that_expired_are_swept_once_no_batch_uses_them(store, tmp_path):
    now = [time.time()]
    sweeper = Sweeper(store, tmp_path / "ledgers", lambda: now[0])
    used = kept_within(store, 10, None, expires_after=3600)
    kept_within(store, 10, None, expires_after=3600)
    kept = keep(store)
    later = kept_within(store, 10, None, expires_after=30 * 86_400)
    batch = batch_of(store, used)
    sweeper.sweep()
    now[0] += 3601
    sweeper.sweep()
    assert len(names(store)) == 4, "the time of day may be wrong for a moment"
    sweeper.sweep()
    assert names(store) == sorted([used.id, kept.id, later.id])
    store.batches.write(over(batch))
    sweeper.sweep()
    assert names(store) == sorted([kept.id, later.id])


def test_a_time_of_day_that_jumps_and_comes_back_deletes_nothing(store, tmp_path):
    now = [time.time()]
    sweeper = Sweeper(store, tmp_path / "ledgers", lambda: now[0])
    file = kept_within(store, 10, None, expires_after=3600)
    for jump in (10**8, 0, 10**8, 0):
        now[0] = time.time() + jump
        sweeper.sweep()
    assert names(store) == [file.id]


def test_what_a_batch_leaves_is_kept_for_as_long_as_its_client_said(store):
    batch = store.create_batch(NewBatch(keep(store).id, URL, output_expires_after=3600), "a")
    draft = store.files.draft()
    draft.write(b"x")
    left = store.files.add_unpublished(draft, "a", "out.jsonl", keep(store).id, batch.output_expires_after)
    assert left.expires_at == left.created_at + 3600
    assert batch.begun(NOW, 1).output_expires_after == 3600
