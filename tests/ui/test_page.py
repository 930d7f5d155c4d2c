"""`/ui` as a browser shows it: what is typed is asked, what comes is shown, and nothing else runs or leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import struct
from dataclasses import replace

import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.routing import Mount

from cluster.admission.keys import FixedKeys, KeyEntry, KeyRing, Tenant, hash_key
from cluster.admission.tenants import Tenancy
from cluster.errors import ApiError
from cluster.telemetry.metrics import Metrics, ReplicaSetStats, ReplicaStats
from engine.report import EngineStats
from tests.openai_app import MODEL, app_for, front_for, serving, two_models_app
from tests.ui.browser import Browser, find_browser
from tests.ui.served import ANSWER, Replicas, demo_model, speaker

PATH = find_browser()
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(PATH is None, reason="no Chromium on this machine (apt-get install chromium)"),
]
LAST = "document.querySelector('.turn:last-child')"


@pytest.fixture(scope="module")
def model():
    return demo_model()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    browser = await Browser.start(PATH, folder)
    yield browser
    await browser.close()
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def page(browser, app, *, errors=(), path="/ui", mount="", password=None):
    """A tab at the page. errors: parts of the only errors that its console may show, one each; a text: of any."""
    outer = Starlette(routes=[Mount(mount, app)]) if mount else app
    async with serving(outer) as url:
        tab = await browser.tab()
        if password is not None:
            await tab.answer_prompt(password)
        await tab.open(url + mount + path)
        yield tab
        asked = [one for one in tab.urls if not one.startswith((f"{url}/", "data:"))]
        await tab.close()
    assert asked == []
    if isinstance(errors, str):
        errors = [errors] * len(tab.errors)
    assert len(tab.errors) == len(errors), tab.errors
    assert all(part in told for part, told in zip(errors, tab.errors, strict=True)), tab.errors


def app(model, source, **changes):
    return app_for(source, model, **{"figures": Replicas()} | changes)


async def ask(tab, question):
    await tab.until("document.getElementById('model').value")
    await tab.click("#question")
    await tab.type(question)
    await tab.key("Enter", 13)


async def ended(tab):
    await tab.until("running === null && document.querySelector('.turn')")


async def closed(source):
    async with asyncio.timeout(10):
        while not source.closed:
            await asyncio.sleep(0.01)


async def test_a_question_and_enter_stream_an_answer(browser, model):
    source = speaker(model, hold=12)
    async with page(browser, app(model, source)) as tab:
        await ask(tab, "What does os.path.join do?")
        await tab.until("document.querySelector('.text')?.innerText.includes('puts')")
        assert await tab.value("document.getElementById('question').value") == ""
        assert not await tab.value("document.getElementById('stop-answer').hidden")
        source.go.set()
        await ended(tab)
        assert await tab.value("turns[0].answer") == ANSWER
        assert await tab.value("document.querySelector('.text pre').textContent.startsWith('import os')")
        facts = await tab.text(".facts")
        assert "First token" in facts and "tokens/s" in facts
        tokens = len(model.tokenizer.encode(ANSWER, add_special_tokens=False)) + 1
        assert await tab.value("turns[0].usage.completion_tokens") == tokens
        assert str(tokens) in facts
        assert "complete" in await tab.value("document.getElementById('announce').textContent")


async def test_the_second_question_carries_the_conversation(browser, model):
    source = speaker(model, "Hello!", "Still here.")
    async with page(browser, app(model, source)) as tab:
        await ask(tab, "Hi")
        await ended(tab)
        await ask(tab, "Are you there?")
        await tab.until("turns[1]?.answer === 'Still here.' && running === null")
        prompt = model.tokenizer.decode(list(source.requests[1].prompt_token_ids))
        assert prompt.index("Hi") < prompt.index("Hello!") < prompt.index("Are you there?")


async def test_shift_and_enter_break_the_line(browser, model):
    source = speaker(model, "ok")
    async with page(browser, app(model, source)) as tab:
        await tab.until("document.getElementById('model').value")
        await tab.click("#question")
        await tab.type("one")
        await tab.key("Enter", 13, modifiers=8)
        await tab.type("two")
        assert source.requests == []
        assert await tab.value("document.getElementById('question').value") == "one\ntwo"


async def test_every_control_reaches_the_request(browser, model):
    source = speaker(model, "ok")
    given = {"temperature": "0.35", "top_p": "0.9", "min_p": "0.05", "top_k": "40", "max_tokens": "77", "seed": "12"}
    async with page(browser, app(model, source)) as tab:
        for name, value in given.items():
            await tab.fill(f"#{name}", value)
        await tab.fill("#system", "Answer in verse.")
        await tab.fill("#stop", "END\n\\n\\n")
        assert await tab.value("document.querySelector('[data-for=temperature]').value") == "0.35"
        await ask(tab, "Hi")
        await ended(tab)
    params = source.requests[0].params
    assert {name: getattr(params, name) for name in given} == {name: json.loads(v) for name, v in given.items()}
    assert tuple(params.stop) == ("END", "\n\n")
    assert "Answer in verse." in model.tokenizer.decode(list(source.requests[0].prompt_token_ids))


@pytest.mark.parametrize("how", ["button", "escape"])
async def test_stop_ends_the_request_and_keeps_its_text(browser, model, how):
    source = speaker(model, hold=12)
    async with page(browser, app(model, source)) as tab:
        await ask(tab, "Go on")
        await tab.until("turns[0]?.answer.length > 8")
        await (tab.click("#stop-answer") if how == "button" else tab.key("Escape", 27))
        await closed(source)
        await ended(tab)
        assert "stopped by you" in await tab.text(".facts")
        kept = await tab.value("turns[0].answer")
        assert kept and ANSWER.startswith(kept)
        assert not await tab.value("document.getElementById('send').hidden")


async def test_each_token_is_coloured_by_its_probability_and_tells_its_alternatives(browser, model):
    source = speaker(model)
    async with page(browser, app(model, source)) as tab:
        await tab.click("#logprobs")
        await ask(tab, "What does os.path.join do?")
        await ended(tab)
        spans = await tab.value(
            "[...document.querySelectorAll('.token')].map(e => [Number(e.style.getPropertyValue('--p')),"
            " getComputedStyle(e).backgroundColor])"
        )
        assert len(spans) == await tab.value("turns[0].usage.completion_tokens")
        colours = {}
        for chance, colour in spans:
            assert colours.setdefault(chance, colour) == colour
        assert len(set(colours.values())) == len(colours) >= 5
        shown = await tab.value("document.querySelector('.tokens').textContent")
        assert "🙂" in shown and "print(" in shown
        await tab.hover(".token:nth-child(3)")
        await tab.until("!document.getElementById('tip').hidden")
        rows = await tab.value("[...document.querySelectorAll('#tip li')].map(e => e.innerText)")
        assert len(rows) == 5 and all("%" in row for row in rows)
        assert await tab.value("document.querySelectorAll('#tip .chosen').length") == 1
        await tab.value("document.querySelector('.token').focus()")
        await tab.key("ArrowRight", 39)
        assert await tab.value("document.activeElement === document.querySelectorAll('.token')[1]")
        await tab.click(".acts [aria-pressed]")
        assert await tab.value("document.querySelector('.text').checkVisibility()")


async def test_replicas_show_load_and_cache_and_polling_pauses_with_the_tab(browser, model):
    replicas = Replicas()
    async with page(browser, app(model, speaker(model), figures=replicas)) as tab:
        await tab.until("document.querySelectorAll('.replica').length === 2")
        busy, calm = await tab.value("[...document.querySelectorAll('.replica')].map(e => e.innerText)")
        assert "squadron-7f3a91" in busy and "running\n7" in busy and "waiting\n2" in busy
        assert "42 %" in busy and "63 %" in busy
        assert "5.0 %" in calm and "Prefix cache hits\n\N{EN DASH}" in calm
        assert "2 ready" in await tab.text("#cluster")
        replicas.ready = (True, False)
        await tab.until("document.getElementById('cluster').innerText.includes('1 ready, 1 not')")
        await tab.until("Number([...document.querySelectorAll('.counts dd')][2].textContent) > 0")
        await tab.value(
            "Object.defineProperty(document, 'hidden', {configurable: true, get: () => true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        assert await tab.value("poll.timer") == 0
        looks = replicas.looks
        await tab.value("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
        await tab.until("poll.timer !== 0")
        async with asyncio.timeout(5):
            while replicas.looks == looks:
                await asyncio.sleep(0.01)


async def test_of_several_models_the_user_chooses_one_and_replicas_say_whose_they_are(browser, model):
    other, metrics = replace(model, model_id="other", max_model_len=1024), Metrics()
    sources = [speaker(model, "From the first."), speaker(other, "From the other.")]
    fronts = [
        front_for(sources[0], model, metrics, figures=Replicas()),
        front_for(sources[1], other, metrics, figures=lambda: ReplicaSetStats([ReplicaStats("lone", EngineStats())])),
    ]
    async with page(browser, two_models_app(*fronts, metrics)) as tab:
        await tab.until("document.querySelectorAll('.replica').length === 3")
        heads = await tab.value("[...document.querySelectorAll('.replica h3')].map(e => e.textContent)")
        assert sorted(heads) == [f"{MODEL}: squadron-7f3a91", f"{MODEL}: squadron-c02be4", "other: lone"]
        assert "3 ready" in await tab.text("#cluster")
        assert not await tab.value("document.getElementById('model-field').hidden")
        await tab.value(
            "document.getElementById('model').value = 'other';"
            "document.getElementById('model').dispatchEvent(new Event('change'))"
        )
        assert await tab.value("document.getElementById('model-name').textContent") == "other"
        assert "at most 1024 tokens" in await tab.value("document.getElementById('max_tokens').title")
        await ask(tab, "Hi")
        await ended(tab)
        assert await tab.value("turns[0].answer") == "From the other."
        assert not sources[0].requests


async def test_figures_that_stop_coming_are_said_to_be_old(browser, model):
    replicas = Replicas()
    async with page(browser, app(model, speaker(model), figures=replicas)) as tab:
        await tab.until("document.querySelectorAll('.replica').length === 2")
        await tab.value("window.fetch = () => Promise.reject(new TypeError('gone')); poll.stop(); poll.start()")
        await tab.until("document.getElementById('stale').checkVisibility()")
        stale = await tab.text("#stale")
        assert "cannot be reached" in stale and "Trying again every 2 s" in stale


async def test_an_unknown_model_is_told_in_words(browser, model):
    async with page(browser, app(model, speaker(model)), errors=["404"]) as tab:
        await tab.until("document.getElementById('model').value")
        await tab.value("document.querySelector('#model option').value = 'other'")
        await ask(tab, "Hi")
        await tab.until("document.querySelector('.error')")
        told = await tab.text(".error")
        assert (
            "no such model" in told
            and "`other` does not exist" in told
            and "model_not_found" in told
            and "request req-" in told
        )


async def test_a_busy_server_is_told_with_how_long_to_wait_and_tried_again_only_by_hand(browser, model):
    busy = ApiError("overloaded", "all replicas are full", retry_after=1)
    source = speaker(model, "There.", hold=0, error=busy)
    async with page(browser, app(model, source), errors=["429"]) as tab:
        await ask(tab, "Hi")
        await tab.until("document.querySelector('.error')")
        assert "all replicas are full" in await tab.text(".error")
        assert "Try again in 1 s" in await tab.text(".error")
        source.hold = None
        await tab.until("!document.querySelector('.error button').disabled")
        assert len(source.requests) == 1
        await tab.click(".error button")
        await tab.until("turns[0].answer === 'There.' && running === null")
        assert not await tab.value("document.querySelector('.error')")


async def test_an_error_in_mid_stream_keeps_the_text_before_it(browser, model):
    lost = ApiError("replica_lost", "its replica died and no other took it over")
    async with page(browser, app(model, speaker(model, hold=12, error=lost))) as tab:
        await ask(tab, "Hi")
        await tab.until("document.querySelector('.error')")
        told = await tab.text(".error")
        assert "broke off" in told and "no other took it over" in told
        assert ANSWER.startswith(await tab.value("turns[0].answer"))


async def test_a_server_that_is_gone_is_told(browser, model):
    async with page(browser, app(model, speaker(model))) as tab:
        await tab.until("document.getElementById('model').value")
        await tab.value("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
        await ask(tab, "Hi")
        await tab.until("document.querySelector('.error')")
        assert "cannot be reached" in await tab.text(".error")


async def test_what_a_model_writes_is_text(browser, model):
    evil = "<img src=x onerror='document.title=1'><script>document.title=2</script>"
    async with page(browser, app(model, speaker(model, evil))) as tab:
        await ask(tab, "<b>Hi</b>")
        await ended(tab)
        assert evil in await tab.text(".text")
        assert await tab.text(".mine") == "<b>Hi</b>"
        assert await tab.value("document.querySelectorAll('#log :is(img, script, b:not(.legend b))').length") == 0
        assert await tab.value("document.title") == "Squadron"


async def test_the_key_that_the_browser_asked_for_serves_the_page_too(browser, model):
    source = speaker(model, "Welcome.")
    async with page(browser, app(model, source, api_key="sk-right"), password="sk-right") as tab:
        await tab.until("document.querySelectorAll('.replica').length === 2")
        await ask(tab, "Hi")
        await tab.until("turns[0]?.answer === 'Welcome.'")
        assert await tab.value("sessionStorage.getItem('squadron.key')") is None


async def test_a_tenants_key_is_told_that_the_cluster_is_shown_to_an_admin(browser, model):
    keys = FixedKeys(KeyRing([KeyEntry(hash_key("sk-team"), Tenant("team"))]))
    served = app(model, speaker(model, "Welcome."), tenancy=Tenancy(keys))
    async with page(browser, served, password="sk-team") as tab:
        await tab.until("document.getElementById('state').textContent.includes('key of an admin')")
        await ask(tab, "Hi")
        await tab.until("turns[0]?.answer === 'Welcome.'")
        assert await tab.value("document.querySelectorAll('.replica').length") == 0


async def test_a_key_in_the_address_opens_the_page_and_what_it_asks_for(browser, model):
    served = app(model, speaker(model), api_key="sk-a")
    async with serving(served) as url:
        tab = await browser.tab()
        await tab.open(url.replace("://", "://x:sk-a@") + "/ui")
        await tab.until("document.querySelectorAll('.replica').length === 2")
        await tab.until("document.getElementById('model').value")
        await tab.close()


async def test_another_key_is_asked_for_when_one_is_refused_and_stays_in_the_tab(browser, model):
    source = speaker(model, "Welcome.")
    keys = FixedKeys.one("sk-first")
    served = app(model, source, tenancy=Tenancy(keys))
    async with page(browser, served, password="sk-first", errors="401") as tab:
        await tab.until("document.querySelectorAll('.replica').length === 2")
        keys.ring = FixedKeys.one("sk-right").ring
        await ask(tab, "Hi")
        await tab.until("document.getElementById('key').open")
        await tab.fill("#key-value", "sk-wrong")
        await tab.key("Enter", 13)
        await tab.until("document.getElementById('key-why').textContent.includes('API key') && key.open")
        await tab.fill("#key-value", "sk-right")
        await tab.key("Enter", 13)
        await tab.until("document.querySelectorAll('.replica').length === 2")
        await ask(tab, "Hi")
        await tab.until("turns.at(-1).answer === 'Welcome.'")
        assert await tab.value("sessionStorage.getItem('squadron.key')") == "sk-right"
        assert await tab.value("localStorage.length") == 0
        assert not any("sk-" in url for url in tab.urls)
        assert "sk-" not in await tab.value("document.documentElement.outerHTML")


async def test_it_works_below_a_mount_point(browser, model):
    async with page(browser, app(model, speaker(model, "Here.")), mount="/llm") as tab:
        await ask(tab, "Hi")
        await tab.until("turns[0]?.answer === 'Here.'")
        await tab.until("document.querySelectorAll('.replica').length === 2")


async def test_light_and_dark_follow_the_system_until_somebody_chooses(browser, model):
    async with page(browser, app(model, speaker(model))) as tab:
        colour = "getComputedStyle(document.documentElement).backgroundColor"
        await tab.prefer("light")
        light = await tab.value(colour)
        await tab.prefer("dark")
        dark = await tab.value(colour)
        assert sum(_rgb(light)) > 600 and sum(_rgb(dark)) < 150
        await tab.click("#theme")
        assert await tab.value(colour) == light
        await tab.send("Page.reload")
        await tab.until("document.readyState === 'complete' && document.documentElement.dataset.theme === 'light'")


def _rgb(colour):
    return [float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]


@pytest.mark.parametrize(
    ("name", "size", "scheme"),
    [("light", (1280, 800), "light"), ("dark", (1280, 800), "dark"), ("phone", (390, 844), "light")],
)
async def test_it_fits_the_window(browser, model, tmp_path_factory, name, size, scheme):
    async with page(browser, app(model, speaker(model))) as tab:
        await tab.size(*size)
        await tab.prefer(scheme)
        await ask(tab, "What does os.path.join do?")
        await tab.until("document.querySelectorAll('.replica').length === 2")
        await ended(tab)
        picture = await tab.picture(tmp_path_factory.getbasetemp() / f"ui-{name}.png")
        overflow = "Math.max(...[...document.querySelectorAll('body, header, main, #scroll')]"
        assert await tab.value(f"{overflow}.map(e => e.scrollWidth - e.clientWidth))") <= 0
        assert await tab.value("document.documentElement.scrollHeight <= innerHeight")
        boxes = "[...document.querySelectorAll('header button, #question, #send')].filter(e => e.checkVisibility())"
        inside = "b.left >= 0 && b.right <= innerWidth && b.bottom <= innerHeight"
        assert await tab.value(f"{boxes}.map(e => e.getBoundingClientRect()).every(b => {inside})")
        assert await tab.value(f"{boxes}.every(e => e.ariaLabel || e.innerText || e.labels?.length)")
    scale = 2 if name == "phone" else 1
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (size[0] * scale, size[1] * scale)
