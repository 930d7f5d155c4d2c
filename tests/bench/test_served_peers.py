"""`python -m tests.bench.peers.served` without the servers: a fake of them is a program of this interpreter."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import psutil
import pytest

from tests.bench import __main__ as bench
from tests.bench.peers import served
from tests.bench.peers.served import __main__ as command
from tests.bench.peers.served import client, comparison, servers, table
from tests.bench.peers.served.client import AskError, understood
from tests.bench.peers.served.comparison import Case, Comparison, Round, compare
from tests.bench.peers.served.servers import OURS, SERVERS, Running, Server, ServerError, Setting

ORIGIN = {
    "machine": {"cpu": "a CPU, avx2", "cores": 2, "load_before": 0.1},
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "date": datetime(2026, 11, 27, tzinfo=UTC).isoformat(),
}
# A server as its process: streams in chunks as uvicorn does, in words of one token. Uses 20 ms of CPU for a request.
# `missing`: tokens that it leaves out; `status`: of its answers.
SERVING = """
import http.server, json, sys, time
missing, status = int(sys.argv[2]), int(sys.argv[3])
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["ignore_eos"] and asked["temperature"] == 0 and len(asked["prompt"]) == 128
        began = time.process_time()
        while time.process_time() - began < 0.02: pass
        self.send_response(status); self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
        if status != 200:
            self.chunk('{"error": "all of them are busy"}'); return self.chunk("")
        count = asked["max_tokens"] - missing
        for number in range(count):
            self.event({"choices": [{"text": f" {asked['prompt'][number]}"}], "usage": None})
        self.event({"choices": [], "usage": {"completion_tokens": count}})
        self.chunk("data: [DONE]\\n\\n"); self.chunk("")
    def event(self, event):
        self.chunk(f"data: {json.dumps(event)}\\n\\n")
    def chunk(self, text):
        self.wfile.write(f"{len(text):x}\\r\\n{text}\\r\\n".encode())
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STARTED_TOO = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"


@pytest.fixture
def serving():
    """Return a function that makes a server of the program above, and the processes that were started for it."""

    def make(name="peer", missing=0, status=200, program=SERVING, **settings):
        @contextmanager
        def run(setting):
            port = servers.free_port()
            asked = [sys.executable, "-c", program, str(port), str(missing), str(status)]
            with servers._process(asked, dict(os.environ), port) as process:
                started.extend([psutil.Process(process.pid), *servers.descendants(process.pid)])
                yield Running(port, process.pid, f"{setting.replicas} and {setting.dtype}")

        return Server(name, "1.0", run, **settings)

    started = []
    make.started = started
    return make


def gone(started):
    return started and not any(process.is_running() and process.status() != "zombie" for process in started)


def test_streams_of_a_server_are_timed_counted_and_charged_to_it(serving, tmp_path):
    found = compare(tmp_path, servers=[serving()], streams=[1, 8], replicas=[1], rounds=2)
    assert found.skipped == {}
    assert found.given == {"peer, 1 replica, float32": "1.0, 1 and float32"}
    one, eight = (found.rounds[Case("peer", 1, "float32", streams)] for streams in (1, 8))
    assert [len(each.firsts_ms) for each in (*one, *eight)] == [8, 8, 8, 8], "few at once are asked for several times"
    assert all(each.tokens_per_s > 0 and min(each.firsts_ms) > 0 for each in (*one, *eight))
    assert all(each.cpu_s > 0.1 for each in one), "20 ms for 128 tokens is 0.16 s for 1,000"
    assert all(each.client_cpu_s > 0 for each in one)
    texts = {number: text for each in (*one, *eight) for number, text in each.texts.items()}
    assert len(texts) == 32, "no prompt is asked for twice"
    assert all(text.split() == list(map(str, client.prompt(number))) for number, text in texts.items())
    assert gone(serving.started)


def test_what_a_server_has_started_ends_with_it(serving, tmp_path):
    compare(tmp_path, servers=[serving(program=STARTED_TOO + SERVING)], streams=[1], replicas=[1])
    assert len(serving.started) == 2 and gone(serving.started)


def test_a_server_that_leaves_tokens_out_is_left_out(serving, tmp_path):
    said = []
    peers = [serving("short", missing=1), serving("whole")]
    found = compare(tmp_path, servers=peers, streams=[1], replicas=[1], tell=said.append)
    assert found.skipped == {"short, 1 replica, float32": "a stream has [15] tokens, wanted were 16"}
    assert [case.server for case in found.rounds] == ["whole"]
    assert said[1].startswith("short, 1 replica, float32 is skipped: a stream has")
    assert gone(serving.started)


def test_an_error_is_told_as_the_server_says_it(serving, tmp_path):
    found = compare(tmp_path, servers=[serving(status=503)], streams=[1], replicas=[1])
    (why,) = found.skipped.values()
    assert "503" in why and "all of them are busy" in why


def test_a_server_that_does_not_start_is_told_with_its_last_lines_and_is_not_started_again(serving, tmp_path):
    failing = serving(program="import sys; print('loading'); sys.exit('no such flag')")
    said = []
    found = compare(tmp_path, servers=[failing], replicas=[1], turns=3, tell=said.append)
    assert found.skipped == {"peer, 1 replica, float32": "it ended with 1:\nloading\nno such flag"}
    assert len([line for line in said if line.startswith("turn")]) == 1


def test_what_is_not_installed_is_told_with_the_command_that_installs_it(tmp_path):
    found = compare(tmp_path, servers=[SERVERS["vllm"], SERVERS["ray"]])
    install = "not installed: python -m tests.bench.peers install"
    assert found.skipped == {
        "vllm serve": f"{install} vllm --root {tmp_path}",
        "Ray Serve LLM": f"{install} ray-llm --root {tmp_path}",
    }


def test_an_interrupted_run_ends_the_server_and_tells_what_it_has(serving, tmp_path, monkeypatch):
    real = comparison._round

    async def one_round(port, streams, *rest):
        if streams == 2:
            raise KeyboardInterrupt
        return await real(port, streams, *rest)

    monkeypatch.setattr(comparison, "_round", one_round)
    found = compare(tmp_path, servers=[serving()], streams=[1, 2], replicas=[1], partial=True)
    assert [case.streams for case in found.rounds] == [1]
    assert gone(serving.started)
    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path, servers=[serving()], streams=[1, 2], replicas=[1])
    assert gone(serving.started)


def test_servers_take_turns_and_the_cores_are_shared_out(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "cores", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    peers = [Server(name, "", None) for name in ("one", "two")]
    order = list(comparison.starts(peers, [1, 2], ["float32"], 2, tmp_path, tmp_path))
    assert [(turn, server.name, setting.replicas) for turn, server, setting in order] == [
        (0, "one", 1), (0, "two", 1), (0, "one", 2), (0, "two", 2),
        (1, "two", 1), (1, "one", 1), (1, "two", 2), (1, "one", 2),
    ]  # fmt: skip
    assert [setting.threads for _, _, setting in order[:3]] == [2, 2, 1]
    assert [servers.bound(setting) for _, _, setting in order[:3]] == ["0,1", "0,1", "0|1"]
    assert comparison.named(*order[2][1:]) == "one, 2 replicas, float32"


def test_each_server_is_told_its_threads_its_type_and_its_replicas(tmp_path, monkeypatch):
    ran = []

    @contextmanager
    def process(command, variables, port):
        ran.append((command, variables))
        yield psutil.Process()

    @contextmanager
    def by_ray(python, port, asked):
        ran.append((python, asked))
        yield SimpleNamespace(pid=1)

    monkeypatch.setattr(servers, "_process", process)
    monkeypatch.setattr(servers, "served_by_ray_llm", by_ray)
    monkeypatch.setattr(servers, "cores", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for name in ("vllm", "ray"):
        for replicas in (1, 2):
            with SERVERS[name].run(Setting(replicas, "bfloat16", tmp_path, tmp_path)) as running:
                assert "VLLM_CPU_OMP_THREADS_BIND" in running.given and "libiomp5.so" in running.given
    (one, of_one), (two, of_two), (_, ray_one), (_, ray_two) = ran
    assert one[one.index("--dtype") + 1] == "bfloat16" and "--data-parallel-size" not in one
    assert two[two.index("--data-parallel-size") + 1] == "2"
    assert [each["VLLM_CPU_OMP_THREADS_BIND"] for each in (of_one, of_two)] == ["0,1", "0|1"]
    assert "OMP_NUM_THREADS" not in of_one, "vLLM sets it for the process that computes"
    assert (ray_one.cpus, ray_one.variables["VLLM_CPU_OMP_THREADS_BIND"]) == (2, "0,1")
    assert (ray_two.replicas, ray_two.cpus, ray_two.variables["OMP_NUM_THREADS"]) == (2, 1, "1")
    assert ray_two.engine["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n", "a stream ended early"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b'data: {"error":"no replica"}\n\ndata: [DONE]\n\n', "ended with no replica"),
        (
            b"HTTP/1.1 200 OK\r\n\r\n" + b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n',
            "has no count of its tokens",
        ),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(data, said):
    with pytest.raises(AskError, match=said):
        understood(data, 0.1, 1)


def test_a_stream_is_understood_with_chunks_and_without():
    body = b'data: {"choices":[{"text":"a\\r\\n"}]}\n\ndata: {"choices":[],"usage":{"completion_tokens":1}}\n\n'
    body += b"data: [DONE]\n\n"
    plain = understood(b"HTTP/1.1 200 OK\r\n\r\n" + body, 0.1, 1)
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:9], body[9:50], body[50:]))
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert understood(head + chunks, 0.1, 1) == plain == client.Answer(0.1, 1, "a\r\n")


def round_of(rate, first=10.0, cpu=1.0, texts=None):
    return Round([first, 2 * first, 9 * first], rate, cpu, 0.1, {1: "a", 2: "b"} if texts is None else texts)


def two_servers():
    ours, peer = Case(OURS, 1, "float32", 32), Case("peer", 1, "float32", 32)
    rounds = {peer: [round_of(100.0, 20.0, 3.0, {1: "a", 2: "c"})] * 2, ours: [round_of(200.0), round_of(300.0)]}
    return Comparison(rounds, {"peer, 1 replica, float32": "`peer serve`"}, {"vllm serve": "not\ninstalled"})


def test_the_table_tells_ours_first_the_spread_and_whose_texts_are_ours():
    text = table.markdown(two_servers(), ORIGIN, "the command")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert rows[2][:4] == [OURS, "1", "float32", "32"]
    assert rows[2][4:8] == ["20 (20 to 20)", "90 (90 to 90)", "250 (200 to 300)", "1.00 (1.00 to 1.00)"]
    assert rows[3][0] == "peer" and rows[3][-1] == "1 of 2"
    assert rows[-1] == ["peer", "1", "float32", "32", "2.00", "2.50", "3.00"]
    assert text.startswith("`the command`, 2026-11-27, a CPU, avx2, 2 cores, load 0.1 before; python 3.11.7, torch")
    assert text.endswith("- peer, 1 replica, float32: `peer serve`\n- vllm serve is left out: not installed")


def test_texts_are_compared_with_another_number_of_replicas_where_there_is_no_other_and_not_in_bfloat16():
    found = two_servers()
    two = Case("peer", 2, "float32", 32)
    found.rounds[two] = [round_of(100.0, texts={2: "b", 3: "d"})]
    assert comparison.agreeing(found, two) == (1, 1)
    coarse = {replace(case, dtype="bfloat16"): rounds for case, rounds in found.rounds.items()}
    assert " of " not in table.markdown(Comparison(coarse, {}, {}), ORIGIN, "c").split("|", 1)[1]


def test_make_bench_goes_without_what_is_not_installed(monkeypatch, capsys):
    asked = []

    def compared(root, **settings):
        asked.append(settings)
        return two_servers()

    monkeypatch.setattr(comparison, "compare", compared)
    known = {"served_vs_vllm_32": {"value": 1.0}}
    bench.run_module("peers.served", known)
    assert "served_vs_vllm_32" not in known
    assert capsys.readouterr().err == "peers.served: vllm serve is skipped: not\ninstalled\n"
    assert known["details"]["peers.served"]["figures"]["squadron_tokens_per_s_32_streams_1_replicas_float32"] == 250
    assert asked == [{"streams": (1, 32), "replicas": (1,)}]
    assert served.measure()["vs_peer_cpu_s_per_1000_32_streams_1_replicas_float32"] == 3.0


def test_a_headline_has_the_name_of_its_figure(monkeypatch):
    names = {server: table.slug(SERVERS[server].name) for server in ("vllm", "ray")}
    paths = {headline.path[0] for headline in bench.HEADLINES.values() if headline.module == "peers.served"}
    tail = "32_streams_1_replicas_float32"
    assert paths == {
        f"vs_{name}_{what}_{tail}"
        for name in names.values()
        for what in ("tokens_per_s", "ttft_ms", "cpu_s_per_1000")
    }


def test_the_command_measures_what_it_is_asked_for_and_writes_it(monkeypatch, tmp_path, capsys):
    asked = []

    def compared(root, **settings):
        asked.append((root, settings))
        return two_servers()

    monkeypatch.setattr(command, "compare", compared)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    arguments = ["--only", "ray", "vllm", "--streams", "8", "--turns", "2", "--output", str(tmp_path / "found.md")]
    assert command.main([*arguments, "--root", str(tmp_path)]) == 0
    ((root, settings),) = asked
    assert root == tmp_path and settings["streams"] == [8] and settings["turns"] == 2 and settings["rounds"] == 3
    assert settings["servers"] == [SERVERS["vllm"], SERVERS["ray"]]
    assert "OMP_NUM_THREADS" not in os.environ
    text = (tmp_path / "found.md").read_text()
    assert capsys.readouterr().out == text
    assert text.startswith("`python -m tests.bench.peers.served --only ray vllm --streams 8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--streams", "0"], "'0' is not a count; give 1 or more"),
        (["--only", "sglang"], "invalid choice: 'sglang'"),
        (["--dtypes", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_what_is_not_known_is_refused(arguments, said, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert said in capsys.readouterr().err


def test_a_server_error_names_why_ours_does_not_serve(tmp_path, monkeypatch):
    class Fails:
        text = "Error: the port is taken"
        process = psutil.Process()

        def __init__(self, *arguments, **variables):
            asked.append(arguments)

        def wait_for(self, words):
            raise AssertionError(words)

        def ctrl_c(self):
            asked.append("stopped")

        def kill(self):
            asked.append("killed")

    asked = []
    monkeypatch.setattr(servers, "Command", Fails)
    monkeypatch.setattr(servers, "cores", lambda: 2)
    with (
        pytest.raises(ServerError, match="did not serve:\nError: the port is taken"),
        SERVERS["squadron-serve"].run(Setting(2, "float32", tmp_path, tmp_path)),
    ):
        pass
    assert asked[1:] == ["stopped", "killed"]
    assert asked[0][:8] == ("serve", "demo", "--dtype", "float32", "--replicas", "2", "--cpus-per-worker", "1")
    assert asked[0][8:10] == ("--ingress", "serve")
