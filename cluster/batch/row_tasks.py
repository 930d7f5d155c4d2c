"""What the rows of an input ask for: requests of the OpenAI batch format, or columns of a table.

Source of the format: https://platform.openai.com/docs/api-reference/batch/request-input
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import islice
from typing import Any, Protocol

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.batch.rows import CHAT, COMPLETIONS, URLS, InputSource, SourceRow, Task, brief, quoted
from engine.errors import ConfigError

FIELDS = ("custom_id", "method", "url", "body")
# Fields of a body that the row or the batch itself decides.
OWN_FIELDS = ("model", "prompt", "messages", "stream")
MAX_NAMES = 20  # of columns that a message names
DEFAULT_PROMPT_COLUMN = "prompt"
SYSTEM_ROLES = ("system", "developer")


class RowKind(StrEnum):
    """openai: `custom_id`, `method`, `url` and `body`. plain: columns, one of which is the prompt."""

    OPENAI = "openai"
    PLAIN = "plain"


class TaskMaker(Protocol):
    """Makes the tasks of rows, each from its row alone.

    has_ids: whether the input must give ids to its rows. reports_places: whether the file of errors tells where each
    row lies, beside the fields that OpenAI gives it.
    """

    has_ids: bool
    reports_places: bool

    def custom_id(self, row: SourceRow) -> str | None:
        """Return the row's id, made of its number where the input has none; None where one is missing."""
        ...

    def without_id(self, row: SourceRow) -> str:
        """Return what to say of a row that could be read and has no id: its place comes before it."""
        ...

    def task(self, row: SourceRow) -> Task:
        """Return what the row asks for; what is wrong with it is in the task."""
        ...


def kind_of(source: InputSource) -> RowKind:
    """Return the kind of the first row that can be read, which is taken for that of all. Raises `InputError`."""
    for row in source.rows():
        if row.fields is not None:
            return RowKind.OPENAI if looks_openai(row.fields) else RowKind.PLAIN
    return RowKind.PLAIN


def task_maker(kind: RowKind, model: str, options: ColumnOptions | None = None) -> TaskMaker:
    """Return what makes the tasks of an input. model: for rows that name none. options: of plain rows.

    Raises `ConfigError` when `options` contradict themselves, or are given for rows that have no use for them.
    """
    if kind is RowKind.PLAIN:
        return PlainRows(model, options or ColumnOptions())
    (options or ColumnOptions()).refuse_for_requests()
    return OpenAIRows(model)


def looks_openai(fields: Mapping[str, Any]) -> bool:
    """Whether a row is meant as a request: it has a body that is an object, and another field of a request."""
    return isinstance(fields.get("body"), Mapping) and any(name in fields for name in FIELDS if name != "body")


def default_id(number: int) -> str:
    """Return the id of a row that brings none. number: its place in the input, from 0."""
    return f"row-{number + 1}"


@dataclass(frozen=True, slots=True)
class _Wrong:
    problem: str
    param: str


class OpenAIRows:
    """Tasks of requests. model: for bodies that name none."""

    has_ids = True
    reports_places = False  # custom_ids are the user's own

    def __init__(self, model: str) -> None:
        self._model = model

    def custom_id(self, row: SourceRow) -> str | None:
        """Return the field; None where it is missing, empty or no text."""
        value = (row.fields or {}).get("custom_id")
        return value if isinstance(value, str) and value else None

    def without_id(self, row: SourceRow) -> str:
        """See `TaskMaker.without_id`."""
        value = (row.fields or {}).get("custom_id")
        if value is None:
            return "has no custom_id"
        return f"has the custom_id {quoted(value)}, which must be text and not empty: 'row-1' is one"

    def task(self, row: SourceRow) -> Task:
        """Return the request; anything in it that is not of the format is the row's problem."""
        custom_id = self.custom_id(row) or default_id(row.number)
        if row.fields is None:
            return Task(row.number, custom_id, "", {}, row.problem)
        wrong = _wrong(row.fields)
        if wrong is not None:
            return Task(row.number, custom_id, "", {}, wrong.problem, wrong.param)
        body = row.fields["body"]
        if body.get("model") is None:
            body = {**body, "model": self._model}
        return Task(row.number, custom_id, row.fields["url"], body)


def _wrong(fields: Mapping[str, Any]) -> _Wrong | None:
    extra = next((name for name in fields if name not in FIELDS), None)
    if extra is not None:
        return _Wrong(f"{quoted(extra)} is no field of a batch request, which has {', '.join(FIELDS)}", brief(extra))
    if fields.get("method") != "POST":
        return _Wrong(f"method must be 'POST', not {_shown(fields, 'method')}", "method")
    if fields.get("url") not in URLS:
        return _Wrong(f"url must be one of {', '.join(URLS)}, not {_shown(fields, 'url')}", "url")
    body = fields.get("body")
    if not isinstance(body, Mapping):
        return _Wrong(f"body must be an object with the request's parameters, not {_shown(fields, 'body')}", "body")
    if body.get("stream") not in (None, False):
        return _Wrong("stream must be false in a batch: an answer is written when it is whole", "body.stream")
    return None


def _shown(fields: Mapping[str, Any], name: str) -> str:
    """Return a field's value as a message can hold it."""
    return quoted(fields[name]) if name in fields else "missing"


@dataclass(frozen=True, slots=True)
class ColumnOptions:
    """How plain rows become requests: a prompt asks for a completion, messages ask for a chat.

    prompt_column, messages_column: columns that hold one or the other, in a row at most one of them; messages are a
    list of objects, or its JSON. Where the prompt's column is left at its default, rows of text files have it in the
    column that they have. template: in Jinja, over the row's columns by name (and all of them as `row`); makes
    the prompt, and the two columns mean nothing then. chat: a prompt is a user's message. system: a system message
    for rows that bring none; makes prompts a chat too. id_column: column of custom_ids, "" for `row-1`, `row-2` and
    so on. max_tokens, temperature: of every request, unless None. params: further fields of every request.
    """

    prompt_column: str = DEFAULT_PROMPT_COLUMN
    messages_column: str = "messages"
    template: str | None = None
    chat: bool = False
    system: str | None = None
    id_column: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """Fields of every request; those that have a name here win over `params`."""
        named = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return {**self.params, **{name: value for name, value in named.items() if value is not None}}

    def refuse_for_requests(self) -> None:
        """Raise `ConfigError` when anything is set: rows that are requests already have no use for it."""
        for one in fields(self):
            default = one.default_factory() if callable(one.default_factory) else one.default
            if getattr(self, one.name) != default:
                raise ConfigError(
                    f"{one.name} is for rows of columns, and these are requests of the OpenAI batch format, each "
                    "with a body of its own: leave it out",
                    one.name,
                )


class _RowError(Exception):
    """A row asks for nothing that can be done; `param` names its column."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class PlainRows:
    """Tasks of plain rows. model: what all of them ask. Raises `ConfigError` for a bad template or bad params."""

    reports_places = True

    def __init__(self, model: str, options: ColumnOptions) -> None:
        own = next((name for name in OWN_FIELDS if name in options.params), None)
        if own is not None:
            raise ConfigError(f"params cannot hold {own!r}, which the rows or the batch decide", "params")
        self.has_ids = bool(options.id_column)
        self._options = options
        self._shared = {"model": model, **options.body}
        self._template = None if options.template is None else _compiled(options.template)

    def custom_id(self, row: SourceRow) -> str | None:
        """Return the column's text or whole number; None where it has neither. An unreadable row has a default."""
        if not self.has_ids or row.fields is None:
            return default_id(row.number)
        value = row.fields.get(self._options.id_column)
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            return None
        return str(value)

    def without_id(self, row: SourceRow) -> str:
        """See `TaskMaker.without_id`."""
        column = self._options.id_column
        value = (row.fields or {}).get(column)
        if not _is_filled(value):
            return f"has no custom_id: there is nothing in its column {column!r}"
        return f"has the custom_id {quoted(value)}: the column {column!r} must hold text or a whole number"

    def task(self, row: SourceRow) -> Task:
        """Return the request; a column that is missing or holds something else is the row's problem."""
        custom_id = self.custom_id(row) or default_id(row.number)
        if row.fields is None:
            return Task(row.number, custom_id, "", {}, row.problem)
        try:
            url, asked = self._asked(row.fields, self._prompt_column(row))
        except _RowError as error:
            return Task(row.number, custom_id, "", {}, str(error), error.param)
        return Task(row.number, custom_id, url, {**self._shared, **asked})

    def _prompt_column(self, row: SourceRow) -> str:
        chosen = self._options.prompt_column
        return (row.prompt_column or chosen) if chosen == DEFAULT_PROMPT_COLUMN else chosen

    def _asked(self, columns: Mapping[str, Any], prompt_column: str) -> tuple[str, dict[str, Any]]:
        if self._template is not None:
            return self._of_prompt(_rendered(self._template, columns))
        options = self._options
        prompt, messages = columns.get(prompt_column), columns.get(options.messages_column)
        if _is_filled(prompt) and _is_filled(messages):
            both = f"{prompt_column!r} and {options.messages_column!r}"
            raise _RowError(f"the columns {both} are both filled; leave one of them empty", options.messages_column)
        if _is_filled(messages):
            return CHAT, {"messages": self._with_system(_messages(messages, options.messages_column))}
        if prompt is None:
            raise _RowError(self._nothing(columns, prompt_column), prompt_column)
        if not isinstance(prompt, str):
            raise _RowError(f"the column {prompt_column!r} must hold text", prompt_column)
        return self._of_prompt(prompt)

    def _of_prompt(self, prompt: str) -> tuple[str, dict[str, Any]]:
        if self._options.chat or self._options.system is not None:
            return CHAT, {"messages": self._with_system([{"role": "user", "content": prompt}])}
        return COMPLETIONS, {"prompt": prompt}

    def _with_system(self, messages: list[Any]) -> list[Any]:
        system = self._options.system
        first = messages[0] if messages else None
        if system is None or (isinstance(first, Mapping) and first.get("role") in SYSTEM_ROLES):
            return messages
        return [{"role": "system", "content": system}, *messages]

    def _nothing(self, columns: Mapping[str, Any], prompt_column: str) -> str:
        if looks_openai(columns):
            return "it is a request of the OpenAI batch format among rows of columns; give these a batch of their own"
        if prompt_column in columns:
            return f"the column {prompt_column!r} is empty"
        either = f"{prompt_column!r} or {self._options.messages_column!r}"
        return (
            f"there is nothing in a column {either}; it has {_names(columns)}: name one with --prompt-column or "
            "--messages-column, or make the prompt of them with --template"
        )


def _is_filled(value: Any) -> bool:
    return value is not None and value != ""


def _messages(value: Any, column: str) -> list[Any]:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            raise _RowError(f"the column {column!r} holds text that is no JSON: {error}", column) from error
    if not isinstance(value, list):
        raise _RowError(f"the column {column!r} must hold a list of messages", column)
    return value


def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"template, line {error.lineno}: {error.message}", "template") from error


def _rendered(template: jinja2.Template, columns: Mapping[str, Any]) -> str:
    try:
        return template.render({"row": columns, **columns})
    except jinja2.UndefinedError as error:
        told = f"the template asks for a column that is missing: {brief(str(error))}; it has {_names(columns)}"
        raise _RowError(told, "template") from error
    except Exception as error:  # what a template does with a row's values is its author's
        told = f"the template fails on this row: {type(error).__name__}: {brief(str(error))}"
        raise _RowError(told, "template") from error


def _names(columns: Mapping[str, Any]) -> str:
    return ", ".join([quoted(name) for name in islice(columns, MAX_NAMES)]) or "none"
