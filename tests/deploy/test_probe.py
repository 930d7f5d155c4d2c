"""What Kubernetes' probes are told of a pod."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deploy.probe import PROBES, Probe, main, trouble

PATIENT = "--seconds=60"  # a busy machine is not what is looked for


class Answering(BaseHTTPRequestHandler):
    """Answers as the server's `answers` say, by path; a pair wants a key."""

    def do_GET(self):
        status, body, key = self.server.answers.get(self.path, (404, "not found", None))
        if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
            status, body = 401, "a key is needed"
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        """Say nothing."""


@contextmanager
def answering(**answers):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.answers = {f"/{name}": answer for name, answer in answers.items()}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_answer_of_200_is_health():
    with answering(ready=(200, "{}", None)) as port:
        assert trouble(Probe(port, "/ready")) is None


def test_an_answer_of_503_is_told_with_its_body():
    with answering(ready=(503, "no replica", None)) as port:
        assert trouble(Probe(port, "/ready")).endswith("/ready: 503 no replica")


def test_200_alone_is_not_what_ray_says_when_it_is_well():
    with answering(health=(200, "node is dead", None)) as port:
        assert "node is dead" in trouble(Probe(port, "/health", "success"))
    with answering(health=(200, "success", None)) as port:
        assert trouble(Probe(port, "/health", "success")) is None


def test_nobody_there_is_trouble():
    with answering() as port:
        pass
    assert "refused" in trouble(Probe(port, "/ready"))


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with answering(ready=(200, "{}", None)) as port:
        assert trouble(Probe(port, "/ready")) is None


@pytest.mark.parametrize(("held", "status"), [("secret\n", 0), ("other", 1), (None, 1)])
def test_the_app_is_asked_with_the_key_of_the_file(tmp_path, capsys, held, status):
    file = tmp_path / "probe-key"
    if held is not None:
        file.write_text(held)
    with answering(ready=(200, "{}", "secret")) as port:
        assert main(["app", f"--port={port}", f"--key-file={file}", PATIENT]) == status
    assert ("401" in capsys.readouterr().out) == bool(status)


def test_the_first_failure_ends_the_probe(tmp_path, monkeypatch, capsys):
    with answering(health=(200, "success", None), ready=(503, "starting", None)) as port:
        monkeypatch.setitem(PROBES, "raylet", Probe(port, "/health", "success"))
        arguments = [f"--port={port}", f"--key-file={tmp_path / 'none'}", PATIENT]
        assert main(["raylet", "app", *arguments]) == 1
        assert "starting" in capsys.readouterr().out
        assert main(["raylet", *arguments]) == 0


def test_an_unknown_probe_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["dashboard"])
    assert "invalid choice: 'dashboard'" in capsys.readouterr().err


def test_an_app_that_was_put_to_sleep_is_well_for_it_has_to_be_woken():
    with answering(ready=(503, '{"ready": false, "asleep": ["demo"]}', None)) as port:
        assert trouble(Probe(port, "/ready")) is None
    for body in ('{"ready": false, "asleep": []}', '{"ready": false}', "[]"):
        with answering(ready=(503, body, None)) as port:
            assert "503" in trouble(Probe(port, "/ready"))
