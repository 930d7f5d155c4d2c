"""`squadron chat` against a small server that streams like OpenAI's."""

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from deploy.cli.chat import Chat, ChatError, ChatOptions, sse_events


class Server(ThreadingHTTPServer):
    """Answers every chat with `events`; keeps the bodies that it was sent."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies = []
        self.keys = []
        self.status = 200
        self.sent = []
        self.deleted = []
        self.numbered = False
        self.cuts = []  # events after which the next connections are cut
        self.models = ["demo"]
        self.events = [
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"index": 0, "delta": {"content": "[bold]Hello"}}]},
            {"choices": [{"index": 0, "delta": {"content": " you"}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}},
        ]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        self.server.keys.append(self.headers.get("Authorization"))
        self._send(
            200,
            json.dumps({"data": [{"id": name, "root": name.removesuffix("-alias")} for name in self.server.models]}),
        )

    def do_POST(self):
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.sent.append((self.headers.get("Idempotency-Key"), self.headers.get("Last-Event-ID")))
        if self.server.numbered:
            self._send_numbered()
            return
        if self.server.status != 200:
            self._send(self.server.status, json.dumps({"error": {"message": "prompt is too long"}}))
            return
        self._send(
            200, "".join(f"data: {json.dumps(event)}\n\n" for event in self.server.events) + "data: [DONE]\n\n"
        )

    def do_DELETE(self):
        self.server.deleted.append(self.path)
        self._send(200, "{}")

    def _send_numbered(self):
        """Send the events behind the last one that the client has, and cut the connection where that is planned."""
        events = [*map(json.dumps, self.server.events), "[DONE]"]
        behind = int(self.headers.get("Last-Event-ID") or -1)
        cut = self.server.cuts.pop(0) if self.server.cuts else len(events)
        self.send_response(200)
        if cut < len(events):
            self.send_header("Content-Length", "1000000")
        self.end_headers()
        for number, event in list(enumerate(events))[behind + 1 : cut]:
            self.wfile.write(f"id: {number}\ndata: {event}\n\n".encode())
        self.close_connection = True

    def _send(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        """Keep the test's output clean."""


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def talk(server, lines, **options):
    output = io.StringIO()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    Chat(ChatOptions(url, **options), Console(file=output, width=200)).run(io.StringIO(lines))
    return output.getvalue()


def test_piped_lines_are_messages_of_one_conversation(server):
    output = talk(server, "hi\n\nand again\n", system="Be brief.")
    assert output.count("[bold]Hello you\n") == 2
    assert "5 tokens" in output
    assert server.bodies[0]["model"] == "demo"
    assert server.bodies[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "[bold]Hello you"},
        {"role": "user", "content": "and again"},
    ]


def test_a_quick_message_is_sent_as_it_is_and_nothing_is_asked(server):
    output = io.StringIO()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    assert Chat(ChatOptions(url, system="Be brief."), Console(file=output)).send("/clear\nis a command, is it not?")
    assert "Hello you" in output.getvalue()
    (body,) = server.bodies
    assert [one["content"] for one in body["messages"]] == ["Be brief.", "/clear\nis a command, is it not?"]


def test_clear_forgets_and_exit_ends(server):
    talk(server, "hi\n/clear\nfresh\n/exit\nnever sent\n")
    assert [len(body["messages"]) for body in server.bodies] == [1, 1]
    assert server.bodies[1]["messages"][0]["content"] == "fresh"


def test_the_key_is_sent_and_a_chosen_model_is_not_asked_for(server):
    talk(server, "", api_key="secret")
    assert server.keys == ["Bearer secret"]
    talk(server, "hi\n", model="other")
    assert server.keys == ["Bearer secret"]
    assert server.bodies[0]["model"] == "other"


def test_a_refused_message_is_shown_and_not_kept(server):
    server.status = 400
    output = talk(server, "too long\n")
    assert "Error: prompt is too long" in output
    server.status = 200
    talk(server, "hi\n")
    assert len(server.bodies[-1]["messages"]) == 1


def test_a_refusal_is_not_called_an_answer_that_broke_off(server):
    server.status = 503
    output = talk(server, "hi\n")
    assert "Error: " in output
    assert "broke off" not in output


def test_a_piped_message_without_an_answer_makes_the_command_fail(server):
    url = f"http://127.0.0.1:{server.server_port}"
    assert Chat(ChatOptions(url), Console(file=io.StringIO())).run(io.StringIO("hi\n"))
    server.status = 400
    assert not Chat(ChatOptions(url), Console(file=io.StringIO())).run(io.StringIO("hi\n"))


def test_a_refused_key_names_the_option(server):
    server.status = 401
    assert "--api-key or SQUADRON_API_KEY" in talk(server, "hi\n")


def test_a_stream_that_breaks_off_is_not_taken_for_an_answer(server):
    server.events = server.events[:2]
    assert "broke off" in talk(server, "hi\n")


def test_an_answer_goes_on_behind_what_came_when_its_connection_is_lost(server, monkeypatch):
    monkeypatch.setattr("deploy.cli.chat.PAUSE", 0.0)
    server.numbered, server.cuts = True, [2, 2, 4]
    output = talk(server, "hi\n")
    assert "[bold]Hello [connection lost" in output
    assert "[reconnected: the answer goes on]" in output
    assert output.count("you") == 1
    assert "5 tokens" in output
    keys, behind = zip(*server.sent, strict=True)
    assert len(set(keys)) == 1 and keys[0]
    assert behind == (None, "1", "1", "3")


@pytest.mark.parametrize("numbered", [True, False])
def test_an_answer_that_is_stopped_is_ended_where_the_server_keeps_it(server, monkeypatch, numbered):
    server.numbered = numbered
    server.events = [{"id": "chatcmpl-7", **event} for event in server.events]
    chat = Chat(ChatOptions(f"http://127.0.0.1:{server.server_port}"), Console(file=io.StringIO()))
    take = Chat._take_event

    def stop(self, event, answer, *rest):
        take(self, event, answer, *rest)
        if answer.text:
            raise KeyboardInterrupt

    monkeypatch.setattr(Chat, "_take_event", stop)
    assert chat.run(io.StringIO("hi\n"))
    assert server.deleted == (["/v1/chat/completions/chatcmpl-7"] if numbered else [])


def test_an_error_inside_the_stream_is_shown(server):
    server.events = [{"error": {"message": "all replicas are gone"}}]
    assert "Error: all replicas are gone" in talk(server, "hi\n")


def test_nobody_there_is_one_sentence(server):
    server.server_close()
    address = f"127.0.0.1:{server.server_port}"
    with pytest.raises(ChatError, match=r"no server answers at .*squadron serve demo"):
        Chat(ChatOptions(address), Console(file=io.StringIO())).run(io.StringIO("hi\n"))


def test_comments_and_what_follows_done_are_no_events():
    lines = [": ping", "", 'data: {"a": 1}', "id: 7", 'data: {"b": 2}', "data: [DONE]", "data: {}"]
    assert list(sse_events(iter(lines))) == [(None, {"a": 1}), ("7", {"b": 2})]


class Typed(io.StringIO):
    """Lines from somebody at a terminal."""

    def isatty(self):
        return True


def test_somebody_who_named_no_model_is_told_of_the_others(server, monkeypatch):
    server.models = ["demo", "demo-alias", "other", "third"]
    monkeypatch.setattr("deploy.cli.chat._typed", lambda _: iter(["hi"]))
    output, url = io.StringIO(), f"http://127.0.0.1:{server.server_port}"
    Chat(ChatOptions(url), Console(file=output, width=200)).run(Typed())
    assert "--model chooses another one: other, third" in output.getvalue()
    Chat(ChatOptions(url, model="other"), Console(file=output, width=200)).run(Typed())
    assert [body["model"] for body in server.bodies] == ["demo", "other"]
    assert output.getvalue().count("chooses another") == 1
