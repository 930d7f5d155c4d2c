"""What the command says before it starts anything, and the small pieces around starting."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from ray.exceptions import ActorDiedError

from cluster.app_config import AppConfig, parse_app
from cluster.config import ClusterConfig, parse_config
from cluster.model_names import resolve_model
from cluster.resources import app_resources
from deploy import main as cli
from deploy.batch import flags as batch_flags
from deploy.cli.dry_run import describe_plans, make_plan, make_plans
from deploy.cli.processes import Interrupts
from deploy.serve import command as serving
from deploy.serve import served_app
from deploy.serve.address import connect_host, curl, free_port, is_loopback
from deploy.serve.environment import Environment, prepare_local_ray
from deploy.serve.ray_cluster import JoinedRay, check_capacity
from deploy.serve.readiness import StartError
from engine.errors import CheckpointError, ConfigError
from engine.loader.checkpoint import SINGLE_FILE
from parallel.errors import ShardingError


def squadron(*args, **environment):
    return subprocess.run(
        [sys.executable, "-c", "from deploy.main import main; main()", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "120"} | environment,
        check=False,
    )


def test_help_does_not_wait_for_ray_and_torch():
    heavy = ("ray", "torch", "transformers", "httpx")
    code = f"import sys, deploy.main; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_a_refused_start_is_one_sentence_and_exit_code_1():
    result = squadron("serve", "demo", "--block-size", "17")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "Error: --block-size must be a power of two such as 16, not 17\n"


@pytest.mark.parametrize(
    "command",
    [("serve", "demo"), ("serve", "demo", "--dry-run"), ("batch", "in.jsonl", "out.jsonl", "--model", "demo")],
)
def test_a_variable_that_replicas_would_refuse_is_refused_before_anything_starts(command, monkeypatch):
    monkeypatch.setenv("SQUADRON_CPU_ISA", "avx9")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("deploy.serve.flags.prepare_ray", pytest.fail)
    monkeypatch.setattr(batch_flags, "prepare_ray", pytest.fail)
    with pytest.raises(
        ConfigError, match="SQUADRON_CPU_ISA=avx9 is unknown, or this CPU does not have it; use native"
    ):
        cli.app(command, standalone_mode=False)


@pytest.mark.parametrize("spelling", ["version", "--version", "-v"])
def test_version_names_what_it_runs_on(spelling):
    lines = squadron(spelling).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["squadron", "ray", "torch", "transformers"]


def test_dry_run_prints_settings_that_a_file_takes_and_what_it_would_place():
    app = parse_app({"model": "demo", "tensor_parallel_size": 2, "replicas": 3, "device": "cpu"})
    text = describe_plans(app, make_plans(app))
    again = parse_config(yaml.safe_load(text))
    assert (again.replicas, again.served_model_name, again.device) == (3, ("demo",), "cpu")
    assert again.max_model_len >= 1024
    assert again.dtype in ("float32", "bfloat16")
    assert "Places 3 x 2 ranks" in text
    assert "Needs 6.25 CPUs and 0 GPUs" in text
    assert make_plan(again).resolved == make_plan(app.shared).resolved


def test_dry_run_does_not_print_the_key():
    app = parse_app({"model": "demo", "api_key": "secret", "device": "cpu"})
    text = describe_plans(app, make_plans(app))
    assert "secret" not in text


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"tensor_parallel_size": 7}, ShardingError, "cannot be split over 7"),
        ({"max_model_len": 10**6}, ConfigError, "beyond the model's"),
        ({"model": "./nowhere"}, ConfigError, "no folder ./nowhere"),
        ({"model": "x" * 200}, CheckpointError, "neither a folder nor a model"),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_anything_starts(settings, error, words):
    with pytest.raises(error, match=words):
        make_plan(parse_config({"model": "demo", "device": "cpu"} | settings))


@pytest.mark.parametrize(("weights", "words"), [(None, "is there"), (b"cut", "truncated or damaged")])
def test_a_folder_without_whole_weights_is_refused_before_ray_is_started(tmp_path, weights, words):
    demo = Path(resolve_model("demo"))
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((demo / name).read_bytes())
    if weights is not None:
        (tmp_path / SINGLE_FILE).write_bytes(weights)
    result = squadron("serve", str(tmp_path))
    assert (result.returncode, result.stdout) == (1, "")
    assert str(tmp_path) in result.stderr and SINGLE_FILE in result.stderr and words in result.stderr


def test_a_size_that_cannot_be_split_names_the_flag():
    assert cli.explain(ShardingError("no")) == "no; change --tensor-parallel-size"


def test_a_taken_port_is_refused_by_name_and_zero_finds_a_free_one():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .*in use.*--port"):
            free_port("127.0.0.1", port)
        assert free_port("127.0.0.1", 0) not in (0, port)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.77"):
        free_port("192.0.2.77", 0)


@pytest.mark.parametrize("error", [ActorDiedError(), TimeoutError("HTTP proxies not available after 60s.")])
def test_a_proxy_that_does_not_come_up_is_tried_once_more_and_told_in_one_sentence(monkeypatch, capsys, error):
    def start(**_):
        raise error

    monkeypatch.setattr(served_app.serve, "status", lambda: SimpleNamespace(applications={}, proxies={}))
    monkeypatch.setattr(served_app.serve, "start", start)
    config = parse_app({"model": "demo", "port": free_port("127.0.0.1", 0)})
    app = served_app.ServedApp(config, "http://127.0.0.1:1", print)
    with pytest.raises(StartError, match=f"proxy did not come up: {type(error).__name__}; start again"):
        app.start_serve(verbose=False)
    assert "is tried once more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("host", "port", "told"),
    [("0.0.0.0", 0, None), ("0.0.0.0", 1, "at http://127.0.0.1:"), ("10.1.2.3", 0, "at http://10.1.2.3:")],
)
def test_a_serve_that_runs_already_is_found_where_it_says_that_it_listens(monkeypatch, host, port, told):
    """Whatever answers at the address of the flags may be another cluster's."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        asked = other.getsockname()[1]
        options = {"host": host, "port": asked + port}
        monkeypatch.setattr(served_app.serve, "status", lambda: SimpleNamespace(applications={}, proxies={"node": 1}))
        monkeypatch.setattr(served_app, "serve_details", lambda: {"http_options": options})
        monkeypatch.setattr(served_app.httpx, "get", lambda *_, **__: None)
        app = served_app.ServedApp(parse_app({"model": "demo", "port": asked}), "http://127.0.0.1:1", print)
        if told is None:
            app.start_serve(verbose=False)
            return
        with pytest.raises(StartError, match=f"{told}{asked + port}: give that address with --host {host} --port"):
            app.start_serve(verbose=False)


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "127.0.0.1"}, False),
        ({"host": "0.0.0.0", "api_key": "sk-1"}, False),
        ({"host": "0.0.0.0", "api_key_file": "keys.yaml"}, False),
        ({"host": "0.0.0.0", "api_key": "sk-1", "api_key_file": "keys.yaml"}, False),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_only_a_server_without_keys_of_either_kind_is_said_to_be_open_to_all(
    monkeypatch, capsys, settings, warned, listed
):
    monkeypatch.setattr(served_app, "is_guarded", lambda _: True)
    models = {"models": [{"model": "demo"}]} if listed else {"model": "demo"}
    serving.Server(parse_app(settings | models), serving.Options(), Interrupts()).announce()
    said = " ".join("".join(capsys.readouterr()).split())
    assert ("anybody who reaches" in said) is warned
    assert ("set --api-key, SQUADRON_API_KEY or --api-key-file" in said) is warned
    keyed = len(settings) > 1
    assert ("password is an API key" in said) is keyed
    assert ("$SQUADRON_API_KEY" in said) is keyed


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_refused_and_opens_no_server(key):
    with pytest.raises(ConfigError, match="api_key: must be a key; leave it out"):
        parse_app({"model": "demo", "api_key": key})


@pytest.mark.parametrize(
    ("host", "connect", "loopback"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("localhost", "localhost", True),
        ("0.0.0.0", "127.0.0.1", False),
        ("::", "[::1]", False),
        ("::1", "[::1]", True),
        ("10.1.2.3", "10.1.2.3", False),
        ("server.example", "server.example", False),
    ],
)
def test_where_a_listening_address_is_reached(host, connect, loopback):
    assert connect_host(host) == connect
    assert is_loopback(host) is loopback


def test_a_cluster_too_small_is_refused_with_the_numbers():
    app = AppConfig((ClusterConfig(model="demo", replicas=2, tensor_parallel_size=2),))
    placement = app_resources(app, lambda _: False)
    check_capacity(placement, {"CPU": 4.25}, {"CPU": 8.0})
    with pytest.raises(ConfigError, match=r"4 of 8 CPUs free, but 2 replicas x 2 ranks x 1 and 1 router need 4.25"):
        check_capacity(placement, {"CPU": 4.0}, {"CPU": 8.0})
    behind = app_resources(app.with_shared(routers=2, ingress="gateway"), lambda _: False)
    with pytest.raises(ConfigError, match=r"2 replicas x 2 ranks x 1, 2 routers and 2 gateways need 5;"):
        check_capacity(behind, {"CPU": 4.75}, {"CPU": 8.0})
    with pytest.raises(ConfigError, match=r"0 of 0 GPUs free.*need 4.*--device cpu"):
        check_capacity(app_resources(app, lambda _: True), {"CPU": 64.0}, {"CPU": 64.0})


def test_a_cluster_that_is_not_there_is_told_at_once():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    refused = pytest.raises(ConfigError, match=rf"RAY_ADDRESS={address} cannot be joined .*refused.*unset it")
    with Interrupts() as interrupts, refused:
        JoinedRay(address, False, interrupts)


def test_the_printed_curl_carries_the_key_only_by_name():
    config = ClusterConfig(model="demo", api_key="secret", served_model_name="it's")
    command = curl("http://127.0.0.1:1", config)
    assert "secret" not in command
    assert "$SQUADRON_API_KEY" in command


def test_empty_variables_count_as_unset():
    assert Environment.read({"RAY_ADDRESS": "", "SQUADRON_API_KEY": ""}) == Environment(None, None)
    assert Environment.read({"RAY_ADDRESS": "auto"}).ray_address == "auto"


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """An environment without any of Ray's variables, and an empty home."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    # Deleting what is set later: monkeypatch restores only what it has seen.
    for name in ("RAY_AUTH_TOKEN", *prepare_local_ray.__globals__["LOCAL_RAY"]):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_our_own_ray_gets_a_token_that_only_its_owner_can_read(bare):
    prepare_local_ray()
    token = bare / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64
    assert os.environ["RAY_AUTH_MODE"] == "token"
    before = token.read_text()
    prepare_local_ray()
    assert token.read_text() == before


def test_a_home_that_cannot_be_written_puts_the_token_into_the_environment(bare, monkeypatch):
    (bare / ".ray").write_text("a file where the folder would be")
    prepare_local_ray()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64


def test_what_the_user_set_is_left_alone(bare, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    prepare_local_ray()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert not (bare / ".ray").exists()


def test_a_narrow_terminal_cuts_no_flag_short():
    shown = squadron("serve", "--help", COLUMNS="80").stdout
    assert "--long-prefill-token-threshold" in shown
    assert "…" not in shown


@pytest.mark.parametrize("command", [["chat"], ["status"], ["top", "--once"], ["why", "chatcmpl-1"]], ids=" ".join)
def test_each_command_that_asks_a_server_takes_its_address_alike(command):
    result = squadron(*command, "--url", "http://127.0.0.1:1")
    said = result.stdout + result.stderr
    assert result.returncode in (1, 2), said
    assert "http://127.0.0.1:1" in said
    assert "--url" in said
    assert "Usage" not in said
