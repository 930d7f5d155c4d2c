"""What rows ask for: requests pass as they are, columns become requests, and what is wrong is told in the row."""

import pytest

from cluster.batch.io.source import open_source
from cluster.batch.row_tasks import ColumnOptions, RowKind, kind_of, task_maker
from cluster.batch.rows import SourceRow
from engine.errors import ConfigError

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
REQUEST = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": BODY}


class Rows:
    def __init__(self, *rows):
        self._rows = rows

    def rows(self):
        for number, fields in enumerate(self._rows):
            yield SourceRow(number, f"x.jsonl:{number + 1}", fields, b"", "" if fields is not None else "bad")


def row(fields, number=6):
    return SourceRow(number, "x.jsonl:9", fields, b"", "" if fields is not None else "the line is no JSON object")


def openai(**changes):
    fields = {name: value for name, value in {**REQUEST, **changes}.items() if value is not ...}
    return task_maker(RowKind.OPENAI, "demo").task(row(fields))


def plain(fields, **options):
    return task_maker(RowKind.PLAIN, "demo", ColumnOptions(**options)).task(row(fields))


# --- Requests


def test_a_request_is_asked_as_it_stands_with_the_model_filled_in():
    task = openai()
    assert (task.row, task.custom_id, task.url, task.problem, task.param) == (6, "a", REQUEST["url"], "", None)
    assert task.body == {**BODY, "model": "demo"}
    assert "model" not in BODY
    assert openai(body={**BODY, "model": None}).body["model"] == "demo"
    named = {**BODY, "model": "other", "stream": False}
    assert openai(body=named).body == named


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
def test_three_urls_are_taken(url):
    assert openai(url=url).url == url and not openai(url=url).problem


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"priority": 1}, "priority", "'priority' is no field"),
        ({"method": "GET"}, "method", "must be 'POST', not 'GET'"),
        ({"method": ...}, "method", "must be 'POST', not missing"),
        ({"url": "/v1/responses"}, "url", "/v1/embeddings, not '/v1/responses'"),
        ({"url": ["x" * 1000]}, "url", "..."),
        ({"url": ...}, "url", "missing"),
        ({"body": ...}, "body", "missing"),
        ({"body": "hi"}, "body", "not 'hi'"),
        ({"body": {**BODY, "stream": True}}, "body.stream", "stream must be false"),
        ({"x" * 10**6: 1}, "x" * 80 + "...", "xxx... is no field"),
    ],
)
def test_what_is_no_request_is_told_with_its_field(changes, param, said):
    task = openai(**changes)
    assert task.param == param and said in task.problem and len(task.problem) < 250
    assert (task.custom_id, task.url, task.body) == ("a", "", {})


def test_an_unreadable_row_is_a_task_with_its_problem():
    task = task_maker(RowKind.OPENAI, "demo").task(row(None))
    assert (task.custom_id, task.problem) == ("row-7", "the line is no JSON object")
    assert plain(None).problem == "the line is no JSON object" and plain(None).custom_id == "row-7"


@pytest.mark.parametrize("value", [None, "", 7, ["a"]])
def test_a_custom_id_is_text(value):
    maker = task_maker(RowKind.OPENAI, "demo")
    assert maker.custom_id(row({**REQUEST, "custom_id": value})) is None
    assert maker.custom_id(row(REQUEST)) == "a"
    assert maker.custom_id(row(None)) is None


# --- Which kind


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([REQUEST, {"prompt": "x"}], RowKind.OPENAI),
        ([None, REQUEST], RowKind.OPENAI),
        ([{"body": BODY, "custom_id": "a"}], RowKind.OPENAI),
        ([{"prompt": "x"}, REQUEST], RowKind.PLAIN),
        ([{"url": "https://x", "body": "text of a page"}], RowKind.PLAIN),
        ([{"custom_id": "a", "prompt": "x"}], RowKind.PLAIN),
        ([None], RowKind.PLAIN),
        ([], RowKind.PLAIN),
    ],
)
def test_the_first_row_that_can_be_read_tells_the_kind(rows, kind):
    assert kind_of(Rows(*rows)) is kind


def test_rows_of_the_other_kind_are_problems():
    assert "rows of columns" in plain(REQUEST).problem
    task = task_maker(RowKind.OPENAI, "demo").task(row({"custom_id": "a", "prompt": "x"}))
    assert task.param == "prompt"


# --- Columns


def test_a_prompt_asks_for_a_completion():
    task = plain({"prompt": "hi", "other": 1})
    assert (task.url, task.body, task.custom_id) == ("/v1/completions", {"model": "demo", "prompt": "hi"}, "row-7")
    assert plain({"q": "hi"}, prompt_column="q").body["prompt"] == "hi"
    assert plain({"prompt": ""}).body["prompt"] == ""


def test_rows_of_text_files_have_their_prompt_in_the_column_that_they_have(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "two"}\n{"text": "three"}\n')
    found = list(open_source([str(tmp_path)], tmp_path).rows())

    def asked(**options):
        maker = task_maker(RowKind.PLAIN, "demo", ColumnOptions(**options))
        return [maker.task(one).body.get("prompt") for one in found]

    assert asked() == ["one", "two", None]
    assert asked(prompt_column="text") == ["one", None, "three"]
    assert asked(template="{{ text }}!") == ["one!", None, "three!"]


def test_messages_ask_for_a_chat():
    messages = [{"role": "user", "content": "hi"}]
    task = plain({"messages": messages})
    assert (task.url, task.body) == ("/v1/chat/completions", {"model": "demo", "messages": messages})
    assert plain({"m": '[{"role":"user","content":"hi"}]', "prompt": ""}, messages_column="m").body == task.body
    assert plain({"messages": messages, "prompt": None}).body == task.body


def test_a_system_message_makes_a_chat_and_yields_to_the_rows_own():
    user = {"role": "user", "content": "hi"}
    system = {"role": "system", "content": "be brief"}
    assert plain({"prompt": "hi"}, system="be brief").body["messages"] == [system, user]
    assert plain({"messages": [user]}, system="be brief").body["messages"] == [system, user]
    own = [{"role": "developer", "content": "mine"}, user]
    assert plain({"messages": own}, system="be brief").body["messages"] == own
    assert plain({"prompt": "hi"}, chat=True).body["messages"] == [user]
    assert plain({"prompt": "hi"}, chat=True).url == "/v1/chat/completions"


def test_a_template_is_filled_from_the_columns():
    fields = {"text": "abc", "my column": 2, "tags": ["x", "y"]}
    template = "{{ text | upper }} {{ row['my column'] }} {{ tags | join('+') }}\n"
    assert plain(fields, template=template).body == {"model": "demo", "prompt": "ABC 2 x+y\n"}
    chat = plain(fields, template="{{ text }}", system="s")
    assert chat.url == "/v1/chat/completions" and chat.body["messages"][1]["content"] == "abc"
    assert plain({"text": "{{ 7 * 7 }} <b>"}, template="{{ text }}").body["prompt"] == "{{ 7 * 7 }} <b>"


@pytest.mark.parametrize(
    ("fields", "template", "said"),
    [
        ({"a": 1}, "{{ b }}", "'b' is undefined; it has 'a'"),
        ({"a": 1}, "{{ row['b'] }}", "no attribute 'b'"),
        ({"a": 1}, "{{ a / 0 }}", "ZeroDivisionError"),
        ({"a": 1}, "{{ a + 'x' }}", "TypeError"),
        ({"a": 1}, "{{ a.__class__.__mro__ }}", "unsafe"),
        ({"a": []}, "{{ a.append(1) }}", "Error"),
        ({"a": {}, "b": "x" * 10**6}, "{{ {}[b].c }}", "xxx"),
        ({"a": "{" + "x" * 10**6 + "}"}, "{{ a.format() }}", "KeyError: 'xxx"),
    ],
)
def test_a_template_that_fails_on_a_row_is_the_rows_problem(fields, template, said):
    task = plain(fields, template=template)
    assert said in task.problem and task.param == "template" and len(task.problem) < 300 and not task.body


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"text": "x"}, "prompt", "'prompt' or 'messages'; it has 'text': name one with --prompt-column or"),
        ({}, "prompt", "it has none"),
        ({"x" * 10**6: 1}, "prompt", "it has 'xxx"),
        ({f"{i}": 1 for i in range(10**5)}, "prompt", "it has '0', '1', "),
        ({"prompt": None}, "prompt", "the column 'prompt' is empty"),
        ({"prompt": 5}, "prompt", "must hold text"),
        ({"prompt": "x", "messages": []}, "messages", "both filled"),
        ({"messages": "hi"}, "messages", "no JSON"),
        ({"messages": {"role": "user"}}, "messages", "list of messages"),
    ],
)
def test_columns_that_ask_for_nothing_are_told(fields, param, said):
    task = plain(fields)
    assert task.param == param and said in task.problem and len(task.problem) < 300 and not task.body


def test_params_are_fields_of_every_request():
    task = plain({"prompt": "x"}, params={"max_tokens": 3, "temperature": 0})
    assert task.body == {"model": "demo", "max_tokens": 3, "temperature": 0, "prompt": "x"}


@pytest.mark.parametrize(
    ("value", "expected"), [("a", "a"), (5, "5"), (None, None), ("", None), (True, None), (1.5, None)]
)
def test_ids_of_plain_rows_are_text_or_whole_numbers(value, expected):
    maker = task_maker(RowKind.PLAIN, "demo", ColumnOptions(id_column="id"))
    assert maker.has_ids
    assert maker.custom_id(row({"id": value, "prompt": "x"})) == expected
    assert maker.task(row({"id": value, "prompt": "x"})).custom_id == (expected or "row-7")
    assert not task_maker(RowKind.PLAIN, "demo").has_ids


@pytest.mark.parametrize("name", ["model", "prompt", "messages", "stream"])
def test_params_that_the_rows_decide_are_refused(name):
    with pytest.raises(ConfigError, match=name) as caught:
        task_maker(RowKind.PLAIN, "demo", ColumnOptions(params={name: 1}))
    assert caught.value.flag == "params"


def test_a_template_that_is_none_is_refused_before_any_row():
    with pytest.raises(ConfigError, match=r"template, line 2: .*endif") as caught:
        task_maker(RowKind.PLAIN, "demo", ColumnOptions(template="a\n{% if x %}"))
    assert caught.value.flag == "template"


@pytest.mark.parametrize(
    "options", [{"template": "x"}, {"system": "x"}, {"chat": True}, {"params": {"n": 1}}, {"id_column": "a"}]
)
def test_options_of_columns_are_refused_for_requests(options):
    with pytest.raises(ConfigError, match="leave it out") as caught:
        task_maker(RowKind.OPENAI, "demo", ColumnOptions(**options))
    assert caught.value.flag == next(iter(options))
