"""What `python -m tests.bench.gpu` does on the day that a GPU is there: its load, limits, rows and tables."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.loader.checkpoint import open_model
from engine.models.rope_config import read_rope
from tests.bench.gpu import __main__ as command
from tests.bench.gpu import part_checks, part_load
from tests.bench.gpu.bench import Bench, NotHere, OutOfTime
from tests.bench.gpu.catalogue import catalogue
from tests.bench.gpu.checkpoints import checkpoint
from tests.bench.gpu.figures import Figure, Part, chosen
from tests.bench.gpu.limits import GIVEN, Limits, decode_limit, load_limit, prefill_flop
from tests.bench.gpu.loads import nano_vllm
from tests.bench.gpu.part_decode import hidden_share, idle_share
from tests.bench.gpu.part_parity import Outputs, agreement
from tests.bench.gpu.part_toggles import TOGGLES
from tests.bench.gpu.profiled import covered
from tests.bench.gpu.results import Results
from tests.bench.gpu.scale import FULL, TINY
from tests.bench.gpu.shapes import LLAMA_1B, QWEN3_06B, QWEN3_8B, REAL, tiny
from tests.bench.gpu.table import number, tables

NAMES = [shape.name for shape in REAL]
COPY, PRODUCT = Figure("limits/copy", "copy", "TB/s"), Figure("limits/bf16", "product", "TFLOP/s")


def test_the_load_is_nano_vllms():
    load = nano_vllm()
    assert (len(load.prompts), sum(map(len, load.prompts)), sum(load.outputs)) == (256, 142_827, 133_966)
    assert max(max(prompt) for prompt in load.prompts) <= 10_000
    # The first draws of `seed(0)`, so that the prompts are the same too and not only their lengths.
    assert (len(load.prompts[0]), load.prompts[0][:3]) == (964, [6311, 6890, 663])


@pytest.mark.parametrize(
    ("shape", "batch", "expected"),
    [
        (QWEN3_06B, 1, 3_284),
        (QWEN3_06B, 32, 27_800),
        (QWEN3_06B, 256, 35_200),
        (QWEN3_8B, 1, 281),
        (QWEN3_8B, 32, 6_900),
        (QWEN3_8B, 256, 20_500),
    ],
)
def test_decode_limits_are_those_of_the_issue(shape, batch, expected):
    assert decode_limit(shape, batch, 1024, GIVEN) == pytest.approx(expected, rel=0.002)


def test_load_limits_are_those_of_the_issue():
    limits = [load_limit(shape, nano_vllm(), GIVEN) for shape in (QWEN3_06B, QWEN3_8B)]
    assert limits == pytest.approx([36_400, 13_000], rel=0.002)


def test_limits_follow_the_rates():
    twice = Limits(2 * GIVEN.bandwidth, 2 * GIVEN.flops)
    assert load_limit(QWEN3_8B, nano_vllm(), twice) == pytest.approx(2 * load_limit(QWEN3_8B, nano_vllm(), GIVEN))
    half = decode_limit(QWEN3_8B, 1, 0, GIVEN, weight=1)
    assert decode_limit(QWEN3_8B, 1, 0, GIVEN) < half < 2 * decode_limit(QWEN3_8B, 1, 0, GIVEN)
    whole = prefill_flop(QWEN3_8B, 100) + prefill_flop(QWEN3_8B, 60, before=100)
    assert whole - 2 * QWEN3_8B.head_weights == pytest.approx(prefill_flop(QWEN3_8B, 160))


def test_shapes_have_the_sizes_of_their_models():
    sizes = [shape.stored_weights / 1e9 for shape in REAL]
    assert sizes == pytest.approx([0.596, 1.236, 8.19], rel=0.001)
    assert QWEN3_8B.kv_per_token * 2 == 147_456  # bytes in bf16


@pytest.mark.parametrize("shape", [QWEN3_06B, LLAMA_1B, QWEN3_8B], ids=lambda shape: shape.name)
def test_checkpoints_have_every_tensor_that_transformers_wants(shape, tmp_path):
    folder = checkpoint(tiny(shape), tmp_path, torch.device("cpu"))
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(p.numel() for p in model.parameters() if p.ndim == 2) == tiny(shape).stored_weights
    assert read_rope(open_model(str(folder)).config.hf, shape.head_dim, 64).theta == shape.rope_theta
    logits = model(torch.arange(10, 42)[None]).logits.detach()
    assert 1.5 < float(logits.std()) < 6 and len(logits.argmax(-1).unique()) > 16
    stamp = folder.stat().st_mtime_ns
    assert checkpoint(tiny(shape), tmp_path, torch.device("cpu")).stat().st_mtime_ns == stamp


def bench(tmp_path, **more):
    return Bench(Results(tmp_path / "r.json"), TINY, torch.device("cpu"), tmp_path, **more)


def part_of(run, *names, **more):
    return Part("p", "P", tuple(Figure(name, name, "s") for name in names), run, **more)


def fail():
    raise RuntimeError("broken")


def absent():
    raise NotHere("nobody made it")


def test_one_failure_leaves_the_other_figures_alone(tmp_path, capsys):
    def run(it):
        it.measure(lambda: [3.0, 1.0, 2.0], "p/a")
        it.measure(fail, "p/b")
        it.measure(absent, "p/c")
        it.measure(lambda: ([4.0], 5.0), "p/d", "p/e")
        fail()

    one = bench(tmp_path)
    one.run(part_of(run, "p/a", "p/b", "p/c", "p/d", "p/e", "p/f"))
    rows = Results(one.results.path).rows
    assert (rows["p/a"].value, rows["p/a"].n, rows["p/a"].spread) == (2.0, 3, 1.0)
    assert rows["p/b"].error == "RuntimeError: broken" == rows["p/f"].error
    assert rows["p/c"].skipped == "nobody made it"
    assert (rows["p/d"].value, rows["p/e"].value) == (4.0, 5.0)


def test_a_figure_that_a_part_forgets_is_a_failure(tmp_path):
    one = bench(tmp_path)
    one.run(part_of(lambda it: None, "p/a"))
    assert "without measuring" in one.results.rows["p/a"].error


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path):
    asked = []

    def run(it):
        for name in ("p/a", "p/b"):
            it.measure(lambda name=name: asked.append(name) or 1.0, name)
            it.deadline = limit

    whole = part_of(run, "p/a", "p/b")
    limit = 0.0
    with pytest.raises(OutOfTime):
        bench(tmp_path).run(whole)
    assert asked == ["p/a"]
    limit = math.inf
    bench(tmp_path).run(whole)
    assert asked == ["p/a", "p/b"]
    bench(tmp_path, again=True).run(whole)
    assert asked == ["p/a", "p/b", "p/a", "p/b"]


def test_what_failed_or_was_not_here_is_tried_again(tmp_path):
    tried = []
    for action in (fail, absent, lambda: 7.0, fail):
        bench(tmp_path).run(part_of(lambda it, do=action: it.measure(lambda: tried.append(1) or do(), "p/a"), "p/a"))
    assert len(tried) == 3
    assert Results(tmp_path / "r.json").rows["p/a"].value == 7.0


def test_shares_are_told_of_given_and_of_measured_rates(tmp_path):
    results = Results(tmp_path / "r.json")
    step = Figure("p/step", "step", "s", lambda limits: 8.6e12 / limits.bandwidth, higher=False)
    assert results.take(step, [4.0]).share == 0.5
    results.take(COPY, [2.15])
    results.take(PRODUCT, [395.0])
    row = results.take(step, [8.0])
    assert (row.limit, row.share, row.measured_limit, row.measured_share) == (2.0, 0.25, 4.0, 0.5)


def test_results_of_several_files_are_told_together(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        results = Results(tmp_path / name)
        results.begin({"date": name})
        results.take(Figure(f"p/{name}", name, "s"), [value])
        results.take(Figure("p/both", "both", "s"), [value])
    whole = Results.merged([tmp_path / "a", tmp_path / "b"], "real")
    told = {name: (row.value, whole.runs[row.run]["date"]) for name, row in whole.rows.items()}
    assert told == {"p/a": (1.0, "a"), "p/both": (2.0, "b"), "p/b": (2.0, "b")}
    (tmp_path / "a").write_text("[]")
    with pytest.raises(ValueError, match="no file of results"):
        Results(tmp_path / "a")


def test_an_unknown_part_is_refused_with_those_that_are_known(capsys):
    parts = catalogue(FULL)
    found = [part.name for part in chosen(parts, ["limits", "decode"])]
    assert found == ["limits", "decode-qwen3-0.6b", "decode-qwen3-8b"]
    with pytest.raises(SystemExit) as error:
        command.main(["--only", "limit,everything"])
    assert error.value.code == 2
    assert "everything: there is no such part; known: checks-kernels, " in capsys.readouterr().err


@pytest.mark.parametrize("scale", [FULL, TINY], ids=lambda scale: scale.name)
def test_every_figure_has_a_name_of_its_own_and_a_limit_above_zero(scale):
    figures = [figure for part in catalogue(scale) for figure in part.figures]
    assert len({figure.name for figure in figures}) == len(figures)
    assert all(figure.limit(GIVEN) > 0 for figure in figures if figure.limit)


def test_what_nobody_measured_is_an_empty_cell(tmp_path):
    results = Results(tmp_path / "r.json")
    found = {"date": "today", "commit": "abc+", "gpu": "H200", "versions": {"torch": "2.11"}}
    results.begin(found | {"clocks": {"clocks.sm": "1980 MHz"}})
    results.end({"clocks_during": {"clocks.sm": "1700 to 1980 MHz"}, "clocks_after": {"clocks.sm": "1755 MHz"}})
    parts = [part for part in catalogue(FULL) if not part.name.startswith("checks")]
    figure = parts[0].figures[0]
    results.take(figure, [2.15, 2.15])
    results.fail(parts[0].figures[1], "broken")
    lines = tables(parts, results).splitlines()
    assert f"| {figure.what} | 2.15 | TB/s | 4.3 | 50.0 % |  |  | 0.0 % |" in lines
    assert f"| {parts[0].figures[1].what} |  | TB/s | 4.3 |  |  |  |  |" in lines
    assert f"- {parts[0].figures[1].what}: failed: broken" in lines
    assert "`--only limits`; run 0" in lines and f"`--only {parts[1].name}`" in lines
    clocks = "before: clocks.sm 1980 MHz; while it worked: clocks.sm 1700 to 1980 MHz; after: clocks.sm 1755 MHz"
    assert lines[-2:] == ["- H200; torch 2.11", f"- run 0, today, commit abc+; {clocks}"]


def test_the_docs_have_a_cell_for_every_figure():
    text = (Path(__file__).parents[2] / "docs/gpu.md").read_text(encoding="utf-8")
    for part in catalogue(FULL):
        table = text.partition(f"### {part.title}\n")[2].partition("\n### ")[0]
        told = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
        assert told[2:] == [figure.what for figure in part.figures], part.name


@pytest.mark.parametrize("toggle", TOGGLES, ids=lambda toggle: toggle.name)
def test_toggles_are_settings_of_the_engine(toggle):
    EngineConfig("a model", **toggle.settings)


def test_numbers_are_short():
    assert [number(value) for value in (None, 0.0, 4.3e-5, 0.5, 12.345, 27_801.4)] == [
        "",
        "0",
        "4.30e-05",
        "0.5",
        "12.35",
        "27,801",
    ]


def test_busy_time_counts_what_overlaps_once():
    assert covered([(5, 6), (0, 2), (1, 3), (2.5, 2.75)]) == 4


def test_where_the_time_of_a_step_went():
    assert idle_share(10.0, 9.9) == pytest.approx(1)
    # 2 ms of the host beside 10 ms of the device: all hidden, half of it, none.
    assert [hidden_share(12.0, step, 10.0) for step in (10.0, 11.0, 12.0)] == pytest.approx([100, 50, 0])
    with pytest.raises(NotHere, match="nothing to hide"):
        hidden_share(10.0, 10.0, 10.0)


def test_near_ties_do_not_count_against_greedy_agreement():
    oracle = torch.tensor([[[0.0, 0, 0], [9, 1, 0], [5, 5.01, 0], [2, 0, 1]]])
    theirs = oracle + torch.tensor([0.0, 0.1, 0])
    found = Outputs(torch.zeros(1, 2), oracle[:, :2], torch.tensor([[0, 0, 2]]), theirs, oracle)
    same, clear = agreement(found)
    assert same.tolist() == [[True, False, False]]
    assert clear.tolist() == [[True, False, True]]


def test_json_rows_name_everything(tmp_path):
    results = Results(tmp_path / "r.json")
    results.begin({"date": "today"})
    results.take(COPY, [2.15])
    row = json.loads(results.path.read_text())["rows"][0]
    assert {"name", "value", "unit", "limit", "share", "n", "spread", "error"} <= row.keys()


@pytest.mark.parametrize(
    ("ended", "seconds", "expected", "note"),
    [
        ((6, 6), (10.0, 5.0), 12.0, "attention: sdpa; second run"),
        ((6, 6), (80.0, 5.0), 0.75, "attention: sdpa; first run"),
        (
            (4, 6),
            (150.0, 5.0),
            4 / 15,
            "attention: sdpa; first run, stopped after 150 s: the tokens of the 4 of 6 requests",
        ),
    ],
)
def test_transformers_may_warm_up_as_we_do(ended, seconds, expected, note, tmp_path, monkeypatch):
    runs = [part_load.Run(count, 6, 10 * count, took) for count, took in zip(ended, seconds, strict=True)]
    monkeypatch.setattr(part_load, "their_model", lambda *_: None)
    monkeypatch.setattr(part_load, "_manager", lambda *_: nullcontext())
    monkeypatch.setattr(part_load, "answered", lambda *_: None)
    monkeypatch.setattr(part_load, "_timed", lambda manager, bench, prefix: runs.pop(0))
    monkeypatch.setattr(Bench, "folder", lambda *_: tmp_path)
    one = bench(tmp_path)
    one.run(catalogue(TINY)[[part.name for part in catalogue(TINY)].index("transformers-qwen3-0.6b")])
    row = one.results.rows["transformers-qwen3-0.6b/tokens_per_s"]
    assert row.value == pytest.approx(expected) and row.note.startswith(note)


# Every line of what is to be shown on an H200, by figure: limit (as far as it was given) and aim.
WANTED = {
    **{f"parity-{name}/bfloat16/{what}": (None, "") for name in NAMES for what in ("mean_abs", "max_abs", "greedy")},
    **{f"parity-{name}/bfloat16/agree_clear": (None, "100") for name in NAMES},
    "load-qwen3-0.6b/tokens_per_s": (36_400, "27,000"),
    "load-qwen3-8b/tokens_per_s": (13_000, "10,400"),
    "transformers-qwen3-0.6b/tokens_per_s": (36_400, ""),
    "transformers-qwen3-8b/tokens_per_s": (13_000, ""),
    "decode-qwen3-0.6b/1/tokens_per_s": (3_284, "65 %"),
    "decode-qwen3-0.6b/32/tokens_per_s": (27_800, ""),
    "decode-qwen3-0.6b/256/tokens_per_s": (35_200, "80 to 85 %"),
    "decode-qwen3-8b/1/tokens_per_s": (281, "85 %"),
    "decode-qwen3-8b/32/tokens_per_s": (6_900, ""),
    "decode-qwen3-8b/256/tokens_per_s": (20_500, "80 to 85 %"),
    "prefill-qwen3-8b/fresh": (790, "75 %"),
    "prefill-qwen3-8b/long": (790, "75 %"),
    **{f"decode-{name}/{batch}/idle": (None, "under 1") for name in NAMES[::2] for batch in (1, 32, 256)},
    **{f"decode-{name}/{batch}/hidden": (None, "100") for name in NAMES[::2] for batch in (1, 32, 256)},
    **{f"attention/triton/{case}": (4.3, "") for case in ("1x1024/page-16", "256x8192/page-16", "32x8192/page-256")},
    "start-qwen3-8b/first_token": (None, "under 6"),
    "start-qwen3-8b/wake": (None, "under 0.5"),
}


def test_every_line_of_the_issue_is_a_figure():
    figures = {figure.name: figure for part in catalogue(FULL) for figure in part.figures}
    assert WANTED.keys() <= figures.keys()
    for name, (limit, aim) in WANTED.items():
        assert figures[name].aim == aim, name
        assert limit is None or figures[name].limit(GIVEN) == pytest.approx(limit, rel=0.002), name


def test_what_must_be_right_comes_first_then_the_order_of_a_first_hour():
    names = [part.name for part in catalogue(FULL)]
    hour = ["checks-kernels", "checks-engine", "checks-footprint", "limits", "parity-qwen3-0.6b", "load-qwen3-0.6b"]
    hour += ["decode-qwen3-0.6b", "skew-qwen3-0.6b", "tuning", "attention", "load-qwen3-8b", "decode-qwen3-8b"]
    assert names[: len(hour)] == hour
    aims = {name.partition("/")[0] for name in WANTED if not name.startswith(("parity", "transformers"))}
    explained = names.index("transformers-qwen3-0.6b")
    assert aims <= set(names[:explained])


def test_every_file_of_tests_of_a_gpu_is_in_one_part():
    files = sorted(file.stem.removeprefix("test_") for file in part_checks.FOLDER.glob("test_*.py"))
    assert sorted((*part_checks.KERNELS, *part_checks.ENGINE, *part_checks.FOOTPRINT)) == files


def test_the_commands_of_the_first_45_minutes_are_what_they_say():
    text = (Path(__file__).parents[2] / "docs/gpu.md").read_text(encoding="utf-8")
    first = text.partition("## A first 45 minutes\n")[2].partition("\n## ")[0]
    lines = [line.partition("tests.bench.gpu ")[2].split() for line in first.splitlines() if "-m tests.b" in line]
    asked = [command._parser().parse_args(line) for line in lines if "--only" in line]
    assert len(asked) == 5
    assert all(one.minutes <= 8.5 and str(one.results) == "gpu.json" and one.also for one in asked)
    parts = catalogue(FULL)
    wanted = [part.name for one in asked for part in chosen(parts, one.only.split(","))]
    assert wanted == [part.name for part in parts][: len(wanted)], "the order in which all run"
    assert wanted[-1] == "start-qwen3-8b"


def test_a_table_tells_shares_of_rates_that_another_file_of_such_a_gpu_has(tmp_path):
    step = Figure("p/step", "step", "s", lambda limits: 8.6e12 / limits.bandwidth, higher=False)
    for name, gpu in (("limits", "H100"), ("same", "H100"), ("other", "L4")):
        results = Results(tmp_path / name)
        results.begin({"gpu": gpu})
        if name == "limits":
            results.take(COPY, [2.15])
            results.take(PRODUCT, [395.0])
        else:
            results.take(step, [8.0])
    same = Results.merged([tmp_path / "limits", tmp_path / "same"], "real")
    assert same.share_here(step) == 0.5
    assert Results.merged([tmp_path / "limits", tmp_path / "other"], "real").share_here(step) is None
