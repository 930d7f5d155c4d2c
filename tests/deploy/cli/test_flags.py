"""The command line, the settings file and `ClusterConfig` say the same."""

import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from rich.text import Text
from typer.testing import CliRunner

import deploy
from cluster.config import ClusterConfig, parse_config
from deploy import main as cli
from deploy.cli.flag_texts import OPEN_DEFAULTS
from deploy.cli.flags import CHOICES, in_flags, settings
from deploy.cli.settings_file import load_settings, merge_settings
from engine.config import EngineConfig
from engine.errors import ConfigError

SETTINGS = {setting.name: setting for setting in settings()}


@pytest.fixture
def run(monkeypatch):
    """Run the command line; returns exit code and plain output."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("SQUADRON_API_KEY", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    runner = CliRunner()

    def invoke(*args):
        result = runner.invoke(cli.app, args)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, Text.from_ansi(result.output).plain

    return invoke


@pytest.fixture
def served(monkeypatch):
    """What `squadron serve` would have started."""
    import deploy.serve.command

    seen = []
    monkeypatch.setattr(deploy.serve.command, "serve_app", lambda app, options, _: seen.append((app.shared, options)))
    monkeypatch.setattr("deploy.serve.flags.prepare_ray", lambda address: address)
    return seen


def test_every_setting_but_the_model_is_a_flag_with_help_and_default():
    assert {"model", *SETTINGS} == {f.name for f in fields(ClusterConfig)}
    for field in fields(ClusterConfig):
        if field.name != "model":
            setting = SETTINGS[field.name]
            assert setting.help.endswith(".")
            assert (field.name in OPEN_DEFAULTS) == (field.default is None)
            assert setting.kind in (int, float, str, bool)


def test_help_lists_every_flag_with_its_default(run):
    code, output = run("serve", "--help")
    assert code == 0
    for name in SETTINGS:
        assert re.search(rf"--{name.replace('_', '-')}\b", output), name
    assert "--no-enable-prefix-caching" in output
    assert "-tp" in output
    assert re.search(r"--max-num-seqs .*\(default: 256\)", output)
    for choices in CHOICES.values():
        assert "|".join(choices) in output


def test_flags_reach_the_configuration_with_their_types(run, served):
    code, _ = run(
        *("serve", "demo", "-tp", "2", "--replicas=3", "--no-enable-prefix-caching", "--stall-timeout", "1.5"),
        *("--served-model-name", "x", "--enforce-eager", "--no-async-scheduling", "--wait-for-nodes"),
        *("-q", "int8"),
    )
    assert code == 0
    config, options = served[0]
    assert config == ClusterConfig(
        model="demo",
        tensor_parallel_size=2,
        replicas=3,
        enable_prefix_caching=False,
        stall_timeout=1.5,
        served_model_name="x",
        enforce_eager=True,
        async_scheduling=False,
        quantization="int8",
        ingress="gateway",  # as no cluster is joined
    )
    assert options.wait_for_nodes
    assert options.ray_address is None


def test_gateways_stand_before_a_ray_of_its_own_and_serves_proxy_in_one_that_is_joined(run, served, monkeypatch):
    assert run("serve", "demo")[0] == run("serve", "demo", "--ingress", "serve")[0] == 0
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert run("serve", "demo")[0] == run("serve", "demo", "--ingress", "gateway")[0] == 0
    assert [config.ingress for config, _ in served] == ["gateway", "serve", "serve", "gateway"]


def test_sizes_apart_by_commas_are_numbers(run, served, tmp_path):
    assert run("serve", "demo", "--cudagraph-capture-sizes", "8,1, 2")[0] == 0
    path = tmp_path / "settings.yaml"
    path.write_text("model: demo\ncudagraph_capture_sizes: [16, 4]\n")
    assert run("serve", "--config", str(path))[0] == 0
    assert [config.cudagraph_capture_sizes for config, _ in served] == [(1, 2, 8), (4, 16)]
    assert served[0][0].engine.cudagraph_capture_sizes == (1, 2, 8)
    with pytest.raises(ConfigError, match="must be numbers separated by commas, such as 1,2,4,8, not '8,many'"):
        run("serve", "demo", "--cudagraph-capture-sizes", "8,many")


@pytest.mark.parametrize("given", ["LLM.example.com,*.corp.example", '["llm.example.com", "*.corp.example"]'])
def test_names_of_the_server_and_sites_are_taken_as_lists_too(run, served, tmp_path, given):
    sites = ["--allowed-origins", "https://Chat.example.com:443,http://[fd00::1]:3000"]
    assert run("serve", "demo", "--allowed-hosts", given, *sites)[0] == 0
    path = tmp_path / "settings.yaml"
    path.write_text("model: demo\nallowed_hosts: [a.example]\nallowed_origins: ['*']\n")
    assert run("serve", "--config", str(path))[0] == 0
    assert [(config.allowed_hosts, config.allowed_origins) for config, _ in served] == [
        (("llm.example.com", "*.corp.example"), ("https://chat.example.com", "http://[fd00::1]:3000")),
        (("a.example",), ("*",)),
    ]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("allowed_hosts", "https://llm.example.com"),
        ("allowed_hosts", "llm.example.com:8000"),
        ("allowed_hosts", "a,,b"),
        ("allowed_hosts", []),
        ("allowed_hosts", "a*"),
        ("allowed_origins", "chat.example.com"),
        ("allowed_origins", "https://chat.example.com/"),
        ("allowed_origins", '["https://a", 1]'),
        ("allowed_origins", "[a"),
        ("root_path", "llm"),
        ("root_path", "/"),
        ("root_path", "/a b"),
        ("root_path", "/v1/"),
        ("root_path", "https://example.com/llm"),
    ],
)
def test_what_is_no_name_of_a_server_no_site_or_no_path_is_refused_by_name(name, given):
    with pytest.raises(ConfigError, match=rf"^{name}: must be ") as caught:
        parse_config({"model": "demo", name: given})
    assert caught.value.flag == name


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(run, served, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("model: demo\nmax-num-seqs: 7\nreplicas: 2\nenable_prefix_caching: false\n")
    assert run("serve", "--config", str(path), "--replicas", "5")[0] == 0
    config, _ = served[0]
    assert (config.model, config.max_num_seqs, config.replicas, config.enable_prefix_caching) == ("demo", 7, 5, False)


def test_the_key_may_come_from_the_environment(run, served, monkeypatch):
    monkeypatch.setenv("SQUADRON_API_KEY", "from-environment")
    run("serve", "demo")
    run("serve", "demo", "--api-key", "from-flag")
    assert [config.api_key for config, _ in served] == ["from-environment", "from-flag"]


def test_a_cluster_to_join_comes_from_the_environment(run, served, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    run("serve", "demo")
    assert served[0][1].ray_address == "10.0.0.1:6379"


def test_a_place_for_batches_is_meant_from_here(run, served, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in ("kept", "file://kept", "/kept", "s3://bucket/kept"):
        assert run("serve", "demo", "--batch-dir", given)[0] == 0
    assert run("serve", "demo")[0] == 0
    here = str(tmp_path / "kept")
    assert [config.batch_dir for config, _ in served] == [here, here, "/kept", "s3://bucket/kept", None]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("batch_share", 0), ("batch_share", 1.01), ("batch_share", "nan"), ("max_file_bytes", 1023)],
)
def test_bounds_of_batches_are_checked(setting, value):
    with pytest.raises(ConfigError, match=f"^{setting}: must be") as caught:
        parse_config({"model": "demo", setting: value})
    assert caught.value.flag == setting
    assert parse_config({"model": "demo", "batch_share": 1, "max_file_bytes": 1024}).batch_share == 1


@pytest.mark.parametrize(("typo", "meant"), [("--repicas", "--replicas"), ("--max-seqs", "--max-num-seqs")])
def test_an_unknown_flag_asks_did_you_mean(run, typo, meant):
    code, output = run("serve", "demo", typo, "2")
    assert code == 2
    assert f"Did you mean {meant}?" in output


@pytest.mark.parametrize("given", [["1", "8", "64"], ["1,8", "64"], ["1,8,64"]])
def test_capture_sizes_are_taken_in_the_spelling_of_vllm(run, served, given):
    assert run("serve", "--cudagraph-capture-sizes", *given, "demo", "--replicas", "2")[0] == 0
    config = served[0][0]
    assert (config.model, config.replicas, config.cudagraph_capture_sizes) == ("demo", 2, (1, 8, 64))


def test_an_unknown_key_in_the_file_names_file_and_nearest_key(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("model: demo\nreplica: 2\n")
    with pytest.raises(ConfigError, match=r"settings.yaml: unknown setting replica; did you mean replicas\?"):
        merge_settings(path, {})


def test_a_wrong_value_is_blamed_on_whoever_gave_it(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("model: demo\nport: 99999\n")
    with pytest.raises(ConfigError, match=r"settings.yaml: port: .*99999"):
        merge_settings(path, {})
    with pytest.raises(ConfigError, match=r"^port: must be less.*70000"):
        merge_settings(path, {"port": 70000})


@pytest.mark.parametrize("text", ["port: 8000\nreplicas: 2\nport: 9000\n", "models:\n- {port: 1, port: 1}\n"])
def test_a_key_that_a_file_has_twice_is_refused(tmp_path, text):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"settings.yaml: port is given twice .*line \d"):
        load_settings(path)


@pytest.mark.parametrize("text", ["- a list\n", "1: number as key\n", "model: [unclosed\n", ""])
def test_a_file_that_holds_no_settings_is_refused_by_name(tmp_path, text):
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"odd\.yaml"):
        load_settings(path)
    with pytest.raises(ConfigError, match=r"absent\.yaml cannot be read: No such file or directory; give"):
        load_settings(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("lower max_model_len to 32 or raise num_kv_blocks", "lower --max-model-len to 32 or raise --num-kv-blocks"),
        ("device=cuda: torch sees no CUDA device", "--device=cuda: torch sees no CUDA device"),
        ("port: must be less", "--port: must be less"),
        ("dtype must be one of auto", "--dtype must be one of auto"),
        ("the port of the host", "the port of the host"),
        ("raise --max-model-len", "raise --max-model-len"),
        ("/models/max_model_len/x", "/models/max_model_len/x"),
        ("""it was '{"max_tokens":3}'; raise max_tokens""", """it was '{"max_tokens":3}'; raise --max-tokens"""),
        ("the replicas' max_model_len", "the replicas' --max-model-len"),
        ("generation_config: generation_config.json", "--generation-config: generation_config.json"),
    ],
)
def test_messages_spell_settings_as_flags(said, shown):
    assert in_flags(said) == shown


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"port": True}, "port: must be a number such as 8000, not True"),
        ({"port": 8000.5}, "port: must be a whole number such as 8000, not 8000.5"),
        ({"stall_timeout": "5s"}, "stall_timeout: must be a number such as 3.0, not '5s'"),
        ({"strict_fields": "maybe"}, "strict_fields: must be true or false, not 'maybe'"),
        ({"model": 1}, "model: must be a text: put it in quotes, as in '1', not 1"),
        ({"tokenizer": " "}, "tokenizer: is empty; leave it out"),
        ({"revision": ""}, "revision: is empty; leave it out"),
        ({"generation_config": ""}, "generation_config: is empty; leave it out, or give a value such as auto"),
        (
            {"host": ""},
            "host: must be an address or a name without scheme or port, such as 127.0.0.1, 0.0.0.0 or ::,",
        ),
        ({"host": "http://0.0.0.0"}, "host: must be an address or a name without scheme"),
        ({"port": 8000, "grpc_port": 8000}, "grpc_port=8000 is the port of HTTP already; give another, or 0 for any"),
        ({"min_replicas": 2}, "such as 3, or replicas=2 alone"),
        ({"replicas": 3, "max_replicas": 2}, "replicas must be between 1 and 2"),
        (
            {"api_key": ["a", "b"]},
            "api_key: must be one key, in quotes if it is a number; several go in a file as --api",
        ),
    ],
)
def test_a_value_of_a_file_that_cannot_be_meant_is_refused_with_one_that_works(values, told):
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}|{re.escape(told)}$"):
        parse_config({"model": "demo", **values})


def test_a_key_that_is_refused_is_not_repeated():
    with pytest.raises(ConfigError) as refused:
        parse_config({"model": "demo", "api_key": 12345})
    assert "12345" not in str(refused.value)


@pytest.mark.parametrize("host", ["::", "::1", "0.0.0.0", "localhost", "my_host.example.com"])
def test_addresses_and_names_are_hosts(host):
    assert parse_config({"model": "demo", "host": host, "port": 0, "grpc_port": 0}).host == host


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["serve", "demo", "--port", "abc"], "'abc' is no whole number; write one such as 8000"),
        (["serve", "demo", "--max-num-seqs", "1e3"], "'1e3' is no whole number; write 1000"),
        (["serve", "demo", "--max-num-seqs", "1,024"], "'1,024' is no whole number; write 1024"),
        (["serve", "demo", "--max-num-seqs", "1.5e0"], "'1.5e0' is no whole number; write one such as 256"),
        (["plan", "demo", "--gpu", "H100", "--input-len", "1k"], "'1k' is no whole number; write 1000"),
        (["serve", "demo", "--gpu-memory-utilization", "90%"], "'90%' is no number; write 0.9"),
        (["serve", "demo", "--gpu-memory-utilization", "0,9"], "'0,9' is no number; write 0.9"),
        (["serve", "demo", "--gpu-memory-utilization", "x%"], "'x%' is no number; write one such as 0.9"),
        (["serve", "demo", "--drain-timeout", "5m"], "'5m' is no number; write 300"),
        (["serve", "demo", "--min-replicas", "x"], "'x' is no whole number; write one such as 8"),
        (["doctor", "--port", "x"], "'x' is no whole number; write one such as 8000"),
        (["keys", "new", "--tenant", "a", "--max-concurrent", "x"], "'x' is no whole number; write one such as 8"),
        (["drain", "--deadline", "2min"], "'2min' is no number; write 120"),
        (["status", "--port", "1"], "No such option: --port. Give the server's address as --url, such as http://127"),
        (
            ["why", "x", "--host", "h"],
            "No such option: --host. Give the server's address as --url, such as http://127",
        ),
        (
            ["plan", "demo", "--port", "1"],
            "No such option: --port. It is for `squadron serve` and changes nothing here",
        ),
        (["batch", "a", "b", "--no-enable-log-requests"], "--no-enable-log-requests. It is for `squadron serve` and"),
    ],
)
def test_what_the_parser_refuses_is_told_with_what_works(run, given, told):
    code, output = run(*given)
    assert code == 2
    assert told in " ".join(output.replace("│", " ").split())


def test_a_flag_without_a_contrary_is_not_told_to_be_of_another_command(run):
    assert "squadron serve`" not in run("serve", "demo", "--no-port")[1]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--expires", "tomorrow"], r"^--expires must be an ISO date-time"),
        (["--requests-per-minute", "0"], r"^--requests-per-minute must be a whole number of at least 1, such as 600"),
        (["--admin", "--scrape"], r"^--admin and --scrape exclude each other: an admin's key may scrape, too"),
    ],
)
def test_a_key_that_cannot_be_made_is_told_by_its_flags(given, told):
    with pytest.raises(ConfigError, match=told):
        CliRunner().invoke(cli.app, ["keys", "new", "--tenant", "a", *given], catch_exceptions=False)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--generation-config", "nowhere"], r"^generation_config must be auto, vllm or a folder"),
        (["--override-generation-config", '{"temprature": 1}'], r"temprature is no sampling parameter; known: temp"),
        (["--api-key-file", "nowhere.yaml"], r"^api_key_file: .*nowhere\.yaml cannot be read: No such file"),
    ],
)
def test_a_dry_run_checks_what_serving_would(given, told):
    with pytest.raises(ConfigError, match=told):
        CliRunner().invoke(cli.app, ["serve", "demo", "--dry-run", *given], catch_exceptions=False)


def test_the_serve_config_file_of_the_demo_is_one_that_serve_and_we_understand():
    values = yaml.safe_load((Path(deploy.__file__).parent / "configs" / "demo.yaml").read_text())
    app = ServeDeploySchema.model_validate(values).applications[0]
    module, name = app.import_path.split(":")
    assert callable(getattr(importlib.import_module(module), name))
    config = parse_config(app.args)
    assert (config.model, config.replicas, config.tensor_parallel_size) == ("demo", 2, 2)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"enforce_eager": "false"}, "enforce_eager must be True or False, not 'false'"),
        ({"async_scheduling": 1}, "async_scheduling must be True or False, not 1"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size must be a whole number, not '2'"),
        ({"max_num_seqs": 2.5}, "max_num_seqs must be a whole number, not 2.5"),
        ({"max_model_len": True}, "max_model_len must be a whole number such as 32768 or 32k, not True"),
        ({"block_size": None}, "block_size must be a whole number, not None"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be a number, not '0.9'"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(setting, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        EngineConfig("model", **setting)
    assert refused.value.flag == next(iter(setting))
    EngineConfig("model", gpu_memory_utilization=1, step_timeout=5, max_model_len=None, async_scheduling=None)
