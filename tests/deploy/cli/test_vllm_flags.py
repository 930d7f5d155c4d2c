"""Whoever knows `vllm serve` can type its flags here: each works, or says in one sentence what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from cluster.config import ClusterConfig, parse_config
from deploy import main as cli
from deploy.cli.flags import SEVERAL_KEYS, in_flags
from deploy.cli.settings_file import load_settings, merge_settings
from deploy.cli.vllm_commands import VARIABLES
from deploy.cli.vllm_flags import advice_on, our_spelling
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.near_name import near_name
from engine.vllm_advice import ADVICE, SHORT
from tests.deploy.cli.vllm_list import PYTHON, installed_list, stored_list

FLAGS = [names for group in stored_list()["groups"].values() for names in group if "--help" not in names]
OURS = {
    name
    for param in typer.main.get_command(cli.app).commands["serve"].params
    for name in (*param.opts, *param.secondary_opts)
}


@pytest.fixture
def run(monkeypatch):
    """Run the command line; returns exit code and plain output in one line."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.delenv("SQUADRON_API_KEY", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    runner = CliRunner()

    def invoke(*args: str):
        result = runner.invoke(cli.app, args)
        if isinstance(result.exception, ConfigError):
            return 1, in_flags(str(result.exception))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, " ".join(Text.from_ansi(result.output).plain.split())

    return invoke


@pytest.fixture
def served(monkeypatch) -> list[ClusterConfig]:
    """What `squadron serve` would have started."""
    import deploy.serve.command

    seen: list[ClusterConfig] = []
    monkeypatch.setattr(deploy.serve.command, "serve_app", lambda app, options, _: seen.append(app.shared))
    monkeypatch.setattr("deploy.serve.flags.prepare_ray", lambda address: address)
    return seen


def test_every_flag_of_vllm_is_ours_or_has_advice():
    assert len(FLAGS) > 200
    unknown = [
        name
        for name in (name for names in FLAGS for name in names)
        if not {*our_spelling([name], OURS)} <= OURS and advice_on(name, [name]) is None
    ]
    assert not unknown
    both = sorted(OURS & {*ADVICE, *SHORT})
    assert not both, "advice that nobody can ever read"


def test_an_opposite_is_taken_in_vllms_spelling(run, served, tmp_path):
    given = ["--disable-prefix-caching", "--disable-expert-parallel", "--disable-lora", "--enable-cascade-attn"]
    code, output = run("serve", "demo", *given)
    assert (code, "No such option: --enable-cascade-attn. There is no cascade attention" in output) == (2, True)
    assert run("serve", "demo", *given[:-1], "--disable-log-requests")[0] == 0
    path = tmp_path / "vllm.yaml"
    path.write_text("model: demo\ndisable-prefix-caching: true\ndisable_lora: true\ndisable-log-requests: true\n")
    assert run("serve", "--config", str(path))[0] == 0
    assert [one.enable_prefix_caching for one in served] == [False, False]
    path.write_text("model: demo\ndisable-chunked-prefill: true\n")
    with pytest.raises(ConfigError, match=r"there is no setting disable_chunked_prefill: It is always on"):
        load_settings(path)


def test_the_list_is_that_of_the_vllm_that_is_installed():
    python = os.environ.get(PYTHON) or (sys.executable if importlib.util.find_spec("vllm") else None)
    if python is None:
        pytest.skip(f"no vLLM to compare the list with: set {PYTHON} to an interpreter that has it")
    try:
        told = installed_list(python)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{python} has no vLLM that can be imported: {error}")
    known = {name for names in FLAGS for name in names}
    assert {name for group in told["groups"].values() for names in group for name in names} - known <= {
        "-h",
        "--help",
    }


@pytest.mark.parametrize("name", [*ADVICE, *SHORT])
def test_advice_is_one_sentence_about_what_is_there(run, name):
    advice = ADVICE[SHORT.get(name, name)]
    code, output = run("serve", "demo", f"{name}=not-so")
    assert code == 2
    assert f"No such option: {name}. {advice.text}." in output
    assert not advice.text.endswith(".")
    assert ". " not in advice.text
    assert set(re.findall(r"(?<!`)--[a-z][a-z-]+", advice.text)) <= OURS
    for path in re.findall(r"docs/[\w/-]+\.md", advice.text):
        assert (Path(cli.__file__).parents[1] / path).is_file()


@pytest.mark.parametrize("command", [(), ("serve",), ("batch",), ("plan",), ("keys", "new")])
def test_h_shows_the_help_of_each_command(run, command):
    code, output = run(*command, "-h")
    assert code == 0
    assert output.startswith(" ".join(("Usage:", "squadron", *command)))


@pytest.mark.parametrize("flag", ["-pp", "--pipeline-parallel-size", "--pipeline_parallel_size"])
def test_pipelines_are_refused_unless_there_is_one_stage(run, served, flag):
    code, output = run("serve", "demo", flag, "2")
    assert code == 2
    assert f"No such option: {flag.replace('_', '-')}. Layers are not spread over stages: use --tensor-par" in output
    assert run("serve", "demo", flag, "1")[0] == 0
    assert len(served) == 1


@pytest.mark.parametrize(
    "given",
    [
        ["--enable-chunked-prefill", "--disable-log-requests", "--no-enable-lora", "--load-format", "auto"],
        ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"],
        ["--distributed-executor-backend=ray", "--data-parallel-size=1", "--swap-space", "0"],
        ["--disable-hybrid-kv-cache-manager", "--tool-strict-level", "auto"],
    ],
)
def test_what_holds_here_anyway_is_taken(run, served, given):
    assert run("serve", "demo", *given, "--replicas", "2")[0] == 0
    assert (served[0].model, served[0].replicas) == ("demo", 2)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--no-enable-chunked-prefill"], "It is always on"),
        (["--enable-auto-tool-choice"], "--tool-call-parser is enough"),
        (["--load-format", "dummy"], "Weights are read from safetensors files"),
        (["--compilation-config.mode", "3"], "Use --cudagraph-capture-sizes"),
        (["-cc.mode=3"], "Use --cudagraph-capture-sizes"),
        (["-O3"], "Use --enforce-eager"),
        (
            ["--hf-overrides.max_x", "1"],
            '--hf-overrides.max_x. Give --hf-overrides one JSON object, such as \'{"max_x": ',
        ),
        (["--hf_overrides.a.b=1"], """such as '{"a": {"b": "VALUE"}}'."""),
        (["-tp2"], "No such option: -tp2. Write -tp 2."),
        (["-dp2"], "No such option: -dp2. Use --replicas."),
        (
            ["--enforce-eager=true"],
            "--enforce-eager takes no value: write --enforce-eager alone, or --no-enforce-eager",
        ),
        (["--dry-run=1"], "--dry-run takes no value: write --dry-run alone."),
        (["--disable-async-scheduling"], "Use --no-async-scheduling"),
    ],
)
def test_what_does_not_hold_is_refused(run, given, told):
    code, output = run("serve", "demo", *given)
    assert code == 2
    assert told in output


@pytest.mark.parametrize(
    ("given", "number"),
    [("32768", 32768), ("32k", 32000), ("32K", 32768), ("25.6k", 25600), ("1m", 10**6), ("2M", 2 << 20)],
)
def test_numbers_are_taken_as_vllm_writes_them(run, served, tmp_path, given, number):
    flags = ("--max-num-batched-tokens", "--kv-cache-memory-bytes", "--max-inflight-tokens", "--max-file-bytes")
    assert run("serve", "demo", "--max-model-len", given, *(part for flag in flags for part in (flag, given)))[0] == 0
    path = tmp_path / "settings.yaml"
    path.write_text(f"model: demo\nmax-model-len: {given}\n")
    assert run("serve", "--config", str(path))[0] == 0
    names = ("max_num_batched_tokens", "kv_cache_memory_bytes", "max_inflight_tokens", "max_file_bytes")
    assert [one.max_model_len for one in served] == [number, number]
    assert [getattr(served[0], name) for name in names] == [number] * 4


@pytest.mark.parametrize("given", ["auto", "-1"])
def test_a_context_that_is_left_to_vllm_is_the_models_own(run, served, tmp_path, given):
    path = tmp_path / "settings.yaml"
    path.write_text("model: demo\nmax_model_len: 64\n")
    assert run("serve", "--config", str(path), "--max-model-len", given)[0] == 0
    assert served[0].max_model_len is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("32q", "max_model_len: must be a whole number such as 32768 or 32k, not '32q'"),
        ("1.5K", "such as 1K; k takes parts"),
        ("1.5", "whole number"),
    ],
)
def test_other_numbers_are_refused_by_name(run, given, told):
    code, output = run("serve", "demo", "--max-model-len", given)
    assert code == 1
    assert in_flags(told) in output


@pytest.mark.parametrize(
    ("given", "names", "model"),
    [
        (["demo", "--served-model-name", "a", "b"], ("a", "b"), "demo"),
        (["demo", "--served-model-name", "a,b", "c", "--port", "1"], ("a", "b", "c"), "demo"),
        (["--served-model-name", "a", "b", "--model", "demo"], ("a", "b"), "demo"),
        (["--served-model-name", "a", "b", "demo"], ("a", "b"), "demo"),
        (["--served-model-name", "a", "demo"], ("a",), "demo"),
        (["demo", "--served-model-name=a", "--replicas", "2"], ("a",), "demo"),
    ],
)
def test_names_may_be_separated_by_blanks(run, served, given, names, model):
    assert run("serve", *given)[0] == 0
    assert (served[0].names, served[0].model_id, served[0].model) == (names, "a", model)


def test_the_model_may_be_a_flag(run, served):
    assert run("serve", "--model", "demo")[0] == run("serve", "demo", "--model=demo")[0] == 0
    assert [one.model for one in served] == ["demo", "demo"]
    assert run("serve", "demo", "--model", "other") == (1, "model is 'demo' and --model 'other': give one of them")


@pytest.mark.parametrize(("given", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_types_have_vllms_short_names(run, served, given, dtype):
    assert run("serve", "demo", "--dtype", given)[0] == 0
    assert (served[0].dtype, EngineConfig("m", dtype=given).dtype) == (dtype, dtype)


def test_other_spellings_are_taken_for_ours(run, served, tmp_path):
    given = ["--num-gpu-blocks-override", "64", "-asc", "2", "--device-memory-utilization", "0.5"]
    assert run("serve", "demo", *given, "-tp", "2", "-ep", "--max_num_seqs", "4")[0] == 0
    path = tmp_path / "settings.yaml"
    path.write_text("model: demo\nnum-gpu-blocks-override: 64\napi_server_count: 2\nmax-num-seqs: 4\n")
    assert run("serve", "--config", str(path))[0] == 0
    assert [(one.num_kv_blocks, one.routers, one.max_num_seqs) for one in served] == [(64, 2, 4)] * 2
    assert (served[0].tensor_parallel_size, served[0].enable_expert_parallel) == (2, True)
    assert served[0].gpu_memory_utilization == 0.5


def test_a_file_for_vllm_is_read_as_its_flags_are(tmp_path):
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "model: demo\ntensor-parallel-size: 2\npipeline-parallel-size: 1\nenable-chunked-prefill: true\n"
        "enable-auto-tool-choice: true\ntool-call-parser: hermes\nserved-model-name: [a, b]\n"
        "hf-overrides: {rope_theta: 5}\n"
    )
    app = merge_settings(path, {})
    assert (app.shared.tensor_parallel_size, app.shared.names) == (2, ("a", "b"))
    assert json.loads(app.shared.hf_overrides or "") == {"rope_theta": 5}
    path.write_text("model: demo\npipeline-parallel-size: 2\n")
    with pytest.raises(ConfigError, match=r"vllm\.yaml: there is no setting pipeline_parallel_size: Layers are not"):
        load_settings(path)


def test_each_of_several_models_is_read_as_a_single_one_is(tmp_path):
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "models:\n- model: demo\n  pipeline-parallel-size: 1\n  num-gpu-blocks-override: 64\n- model: n\n"
    )
    assert [one.num_kv_blocks for one in merge_settings(path, {}).models] == [64, None]
    path.write_text("models:\n- model: demo\n- model: n\n  enable-lora: true\n")
    with pytest.raises(
        ConfigError, match=r"vllm\.yaml: models\[1\]: there is no setting enable_lora: Adapters are not"
    ):
        load_settings(path)


@pytest.mark.parametrize(
    ("first", "second"), [("max-model-len", "max_model_len"), ("num_kv_blocks", "num-gpu-blocks-override")]
)
def test_a_setting_in_two_spellings_is_refused(tmp_path, first, second):
    path = tmp_path / "vllm.yaml"
    path.write_text(f"model: demo\n{first}: 64\n{second}: 32\n")
    with pytest.raises(ConfigError, match=r"(max_model_len|num_kv_blocks) is given twice; keep one of them"):
        load_settings(path)


@pytest.mark.parametrize("given", ["[1]", "{", "no json"])
def test_overrides_must_be_an_object(given):
    with pytest.raises(ConfigError, match=r"^hf_overrides must be a JSON object such as"):
        parse_config({"model": "demo", "hf_overrides": given})


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("--model", ["--max-model-len", "--reasoning-model"], None),
        ("--load-format", ["--log-format"], None),
        ("--disable-log-requests", ["--enable-log-requests"], None),
        ("--mamba-block-size", ["--block-size"], None),
        ("--hots", ["--host", "--port"], "--host"),
        ("--max-model-length", ["--max-model-len", "--max-log-len"], "--max-model-len"),
        ("--maxmodel-len", ["--max-model-len", "--max-log-len"], "--max-model-len"),
        ("--len-max-model", ["--max-model-len"], "--max-model-len"),
        ("--max-loras", ["--max-replicas", "--max-log-len"], None),
        ("--repicas", ["--replicas", "--routers"], "--replicas"),
        ("--max_model_len", ["--max-model-len"], "--max-model-len"),
        ("--max-seqs", ["--max-num-seqs", "--max-replicas"], "--max-num-seqs"),
        ("--tensor-parallel", ["--tensor-parallel-size", "--enable-expert-parallel"], "--tensor-parallel-size"),
        ("--max", ["--max-model-len", "--max-num-seqs"], None),
        ("--kv", ["--num-kv-blocks", "--kv-cache-dtype"], None),
    ],
)
def test_only_what_is_near_is_proposed(name, known, meant):
    assert near_name(name, known) == meant


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--max-logprob", ". Did you mean --max-logprobs?"),
        ("--hf-tokens", ", nor vLLM's --hf-token. Set HF_TOKEN, or log in with `hf auth login`."),
        ("--enable-loras", ", nor vLLM's --enable-lora. Adapters are not served: merge them into the weights."),
        ("--speculative-confg", ", nor vLLM's --speculative-config. There is no speculative decoding."),
        ("--max-model-length", ". Did you mean --max-model-len?"),
    ],
)
def test_a_flag_that_is_nearly_one_of_vllms_is_answered_as_that_one(run, flag, told):
    code, output = run("serve", "demo", f"{flag}=1")
    assert code == 2
    assert f"No such option: {flag}{told}" in output


@pytest.mark.parametrize(
    "given",
    [
        ["demo", "--api-key", "k1", "k2"],
        ["--api-key", "k1", "k2", "k3", "--model=demo"],
        ["--api-key", "k1", "k2", "demo"],
    ],
)
def test_several_keys_are_refused_with_where_they_go(run, served, given):
    code, output = run("serve", *given)
    assert (code, served) == (1, [])
    assert output == in_flags(SEVERAL_KEYS)
    assert "--api-key-file" in output


@pytest.mark.parametrize("given", [["--api-key", "k1", "demo"], ["demo", "--api-key", "k1", "--replicas", "2"]])
def test_one_key_is_taken_wherever_the_model_stands(run, served, given):
    assert run("serve", *given)[0] == 0
    assert (served[0].model, served[0].api_key) == ("demo", "k1")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["bench", "serve", "--model", "m", "--num-prompts", "100"], "Point `vllm bench serve --base-url URL`"),
        (["bench", "throughput", "--model", "m"], "Point `vllm bench serve --base-url URL`"),
        (["run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", "m"], "Use `squadron batch INPUT OUTPUT"),
        (["complete", "--quick", "The future of AI is"], "Use `squadron chat`, or POST to /v1/completions"),
        (["collect-env"], "Use `squadron doctor`, and `squadron version`"),
        (["launch", "render", "m"], "Use `squadron serve`"),
    ],
)
def test_subcommands_of_vllm_say_what_to_do(run, given, told):
    code, output = run(*given)
    assert code == 2
    assert f"No such command '{given[0]}'. {told}" in output


def test_a_subcommand_that_nobody_has_is_unknown(run):
    code, output = run("bnch")
    assert code == 2
    assert "No such command 'bnch'." in output


@pytest.mark.parametrize("name", [*VARIABLES])
def test_each_variable_of_vllm_is_told_with_what_to_do(run, served, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    code, output = run("serve", "demo", "--api-key", "k")
    assert (code, len(served)) == (0, 1)
    assert output == f"{name} is not read: {VARIABLES[name]}."
    assert set(re.findall(r"--[a-z][a-z-]+", VARIABLES[name].partition("`ray")[0])) <= OURS


def test_a_variable_that_was_to_close_the_server_is_not_passed_over(run, served, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "k")
    monkeypatch.setenv("VLLM_FUTURE", "1")
    code, output = run("serve", "demo")
    assert (code, served) == (1, [])
    assert output == (
        "VLLM_API_KEY is not read, and the server would be open: set SQUADRON_API_KEY, or give --api-key"
    )
    monkeypatch.setenv("SQUADRON_API_KEY", "k")
    assert run("serve", "demo")[1].endswith("VLLM_FUTURE is not read: docs/guides/from-vllm.md says what is.")


def test_a_variable_that_is_nearly_that_of_a_key_is_not_passed_over(run, served, monkeypatch):
    monkeypatch.setenv("SQUADRON_APIKEY", "k")
    monkeypatch.setenv("SQUADRON_PORT", "tcp://10.0.0.1:8000")  # as Kubernetes sets it for a service of that name
    code, output = run("serve", "demo")
    assert (code, served) == (1, [])
    assert output == ("SQUADRON_APIKEY is not read, and the server would be open: set SQUADRON_API_KEY, or unset it")
    assert run("serve", "demo", "--api-key", "k") == (
        0,
        "SQUADRON_APIKEY is not read: the variable is SQUADRON_API_KEY.",
    )


def test_no_flag_of_vllm_is_taken_for_another():
    """Even where nothing was known of them: their names are not those of other things here."""
    ours = sorted(name for name in OURS if name.startswith("--"))
    proposed = {name: near for name in ADVICE if (near := near_name(name, ours)) is not None}
    assert proposed == {}


DOCUMENTED = [
    # Online serving
    "NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123",
    "facebook/opt-125m --chat-template {template}",
    "--model Qwen/Qwen3-8B --served-model-name qwen my-alias --host 0.0.0.0 --port 8100",
    "Qwen/Qwen2.5-1.5B-Instruct --generation-config vllm --max-model-len 32k",
    "meta-llama/Llama-3.1-8B-Instruct --uvicorn-log-level warning --root-path /llm",
    "BAAI/bge-multilingual-gemma2 --runner pooling",
    # Tool calling
    "meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice --tool-call-parser llama3_json "
    "--chat-template {template}",
    "NousResearch/Hermes-2-Pro-Llama-3-8B --enable-auto-tool-choice --tool-call-parser hermes",
    "mistralai/Mistral-7B-Instruct-v0.3 --enable-auto-tool-choice --tool-call-parser mistral --tokenizer_mode hf",
    # Reasoning
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --reasoning-parser deepseek_r1",
    "Qwen/Qwen3-8B --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser hermes",
    # Quantization
    "facebook/opt-125m --quantization fp8 --kv-cache-dtype fp8",
    "TheBloke/Llama-2-7b-Chat-AWQ --quantization awq --dtype half",
    "ModelCloud/Llama-3.2-1B-Instruct-gptqmodel-4bit -q gptq --revision main",
    # Long context
    "Qwen/Qwen3-8B --hf-overrides {overrides} --max-model-len 131072",
    # Distributed serving
    "gpt2 --tensor-parallel-size 4 --distributed-executor-backend ray",
    "gpt2 -tp 4 -pp 2",
    "deepseek-ai/DeepSeek-V3-0324 --tensor-parallel-size 1 --data-parallel-size 8 --enable-expert-parallel",
    "facebook/opt-13b --tensor-parallel-size 8 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1",
    # Optimization
    "meta-llama/Llama-3.1-8B-Instruct --max-num-batched-tokens 16384 --enable-chunked-prefill --max-num-seqs 64",
    "meta-llama/Llama-3.1-8B-Instruct --gpu-memory-utilization 0.95 --cudagraph-capture-sizes 1 2 4 -O3",
    # LoRA, speculation, security, configuration
    "meta-llama/Llama-3.2-3B-Instruct --enable-lora --lora-modules sql-lora=path --max-loras 4",
    "Qwen/Qwen3-8B --speculative-config {overrides}",
    "Qwen/Qwen3-8B --ssl-keyfile key.pem --ssl-certfile cert.pem --allowed-origins {origins}",
    "--config {file}",
    # Multi-modal, structured outputs, caching, CPU
    "Qwen/Qwen2.5-VL-3B-Instruct --limit-mm-per-prompt {overrides}",
    "llava-hf/llava-1.5-7b-hf --allowed-local-media-path /data --max-model-len 4096",
    "Qwen/Qwen3-8B --structured-outputs-config {overrides}",
    "Qwen/Qwen3-8B --enable-prefix-caching --kv-cache-memory-bytes 8G --max-num-seqs 32 -asc 2",
    "meta-llama/Llama-3.2-1B-Instruct --dtype bfloat16 --block-size 128 --enforce-eager --seed 1",
]
REFUSED = {  # by place in the list: how the sentence begins
    5: "--runner. Each decoder generates and embeds",
    16: "-pp. Layers are not spread over stages: use --tensor-parallel-size",
    17: "--data-parallel-size. Use --replicas",
    18: "--nnodes. Start Ray on each host",
    20: "-O3. Use --enforce-eager for a faster start",
    21: "--enable-lora. Adapters are not served: merge them into the weights",
    22: "--speculative-config. There is no speculative decoding",
    23: "--ssl-keyfile. TLS ends at an ingress or a reverse proxy in front",
    25: "--limit-mm-per-prompt. Models read and write text alone",
    26: "--allowed-local-media-path. Models read and write text alone",
    27: "--structured-outputs-config. Grammars are always xgrammar's",
}


@pytest.mark.parametrize("number", range(len(DOCUMENTED)))
def test_commands_of_vllms_docs_work_or_say_what_to_do(run, served, tmp_path, number):
    """Source: docs.vllm.ai, pages of online serving, tool calling, reasoning, quantization, parallelism, LoRA."""
    template, file = tmp_path / "template.jinja", tmp_path / "config.yaml"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    file.write_text('model: meta-llama/Llama-3.1-8B-Instruct\nhost: "127.0.0.1"\nport: 6379\n')
    values = {
        "template": str(template),
        "file": str(file),
        "overrides": '{"rope_scaling":{"rope_type":"yarn","factor":4.0}}',
        "origins": '["https://chat.example.com"]',
    }
    parts = [part.format(**values) if part[0] == "{" else part for part in DOCUMENTED[number].split()]
    code, output = run("serve", *parts)
    if number in REFUSED:
        assert code == 2
        assert f"No such option: {REFUSED[number]}" in output
        assert not served
    else:
        assert (code, len(served)) == (0, 1), output
