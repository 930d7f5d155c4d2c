"""What fails inside is logged with all that led to it, and without a word of what a client sent."""

from __future__ import annotations

import errno
import logging
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.batch.row_requests import Preparer
from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.telemetry.logs import JsonLines
from engine.errors import redacted
from engine.text.tokenizer import Tokenizer
from tests.cluster.batch.batch_lab import BatchLab
from tests.cluster.cluster_lab import Lab
from tests.engine.engine_driver import VOCAB
from tests.grpc_client import refusal_of, serving_grpc
from tests.openai_app import MODEL, app_for, client_for, saying, served_model

SECRET = "xyzzyplugh"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(redacted(error)))


class Picky(KeyError):
    """An error of a library."""


@given(st.sampled_from([ValueError, KeyError, Picky, RuntimeError]), st.text(min_size=12))
def test_kind_and_lines_are_told_and_no_words(kind, words):
    told = shown(raised(kind(words)))
    assert told.splitlines()[0] == "Traceback (most recent call last):"
    assert "raise error" in told
    assert told.splitlines()[-1].rpartition(".")[2] == kind.__name__
    assert words not in told


def test_all_that_led_to_it_is_told():
    inner = raised(ValueError(SECRET))
    outer = RuntimeError(SECRET)
    outer.__cause__ = inner
    outer.add_note(SECRET)
    inner.__context__ = outer  # a circle
    told = shown(raised(outer))
    assert told.index("ValueError") < told.index("direct cause") < told.index("RuntimeError")
    group = shown(raised(ExceptionGroup(SECRET, [inner, TypeError(SECRET)])))
    assert {"ValueError", "TypeError"} <= {word.strip("| ") for word in group.splitlines()}
    assert SECRET not in told + group


def test_of_the_system_the_number_is_told_and_no_name_of_a_file():
    told = shown(raised(OSError(errno.EMFILE, SECRET, SECRET)))
    assert told.splitlines()[-1] == "OSError: [Errno 24] Too many open files"
    assert SECRET not in shown(raised(OSError(SECRET)))


def told_by(caplog) -> str:
    lines = [JsonLines().format(one) for one in caplog.records]
    assert any("failed inside" in line and "Traceback" in line for line in lines)
    return "".join(lines) + caplog.text


def quoting(*_: object, **__: object) -> None:
    raise ValueError(f"no text: {SECRET!r}")


class Broken:
    """Quotes a prompt, as libraries do."""

    async def generate(self, request, context=None):
        quoting()
        yield  # a generator

    def finish_choice(self, request_id, choice):
        """Nothing to end."""


@pytest.mark.parametrize("where", ["tokenizer", "source"])
async def test_http_quotes_no_prompt_in_its_log(tmp_path, monkeypatch, caplog, where):
    model = served_model(tmp_path)
    source = saying(model, "ok") if where == "tokenizer" else Broken()
    if where == "tokenizer":
        monkeypatch.setattr(Tokenizer, "encode", quoting)
    with caplog.at_level(logging.DEBUG):
        async with client_for(app_for(source, model)) as client:
            answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": SECRET})
    assert answer.status_code == 500
    assert SECRET not in told_by(caplog)


async def test_grpc_quotes_no_prompt_in_its_log(model, caplog):
    with caplog.at_level(logging.DEBUG):
        async with serving_grpc(Broken(), model) as served:
            await refusal_of(served.stub.Generate(pb.GenerateRequest(model=MODEL, prompt=SECRET)))
    assert SECRET not in told_by(caplog)


async def test_batch_quotes_no_prompt_in_its_log_and_goes_on(model, tmp_path, monkeypatch, caplog):
    prepare = Preparer.prepare
    monkeypatch.setattr(Preparer, "prepare", lambda self, task: quoting() if task.row == 1 else prepare(self, task))
    bodies = [{"model": MODEL, "prompt": [5, 6], "max_tokens": 2}] * 3
    with caplog.at_level(logging.DEBUG):
        async with Lab() as lab:
            await lab.start("a")
            results = await BatchLab(tmp_path, model, bodies).results(lab)
    assert [one.status for one in results] == [200, 500, 200]
    assert SECRET not in told_by(caplog)
