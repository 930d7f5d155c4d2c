"""After sleep the same tokens as before: whatever the architecture, the way it multiplies, or the number of ranks."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import weakref
from collections import defaultdict
from itertools import count
from types import SimpleNamespace

import pytest
import transformers
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import CheckpointError, ConfigError, EngineAsleepError
from engine.llm import LLM
from engine.loader.fingerprint import weights_of
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.worker.executor_start import build_executor, model_info
from engine.worker.graph_sizes import GraphSizes
from engine.worker.local_executor import SoloExecutor
from engine.worker.offload import tensors_of
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests import tiny_tokenizer
from tests.parity.graph_lab import use_graphs
from tests.parity.tiny_models import make, prompts

pytestmark = pytest.mark.usefixtures("one_thread")

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.2, top_p=0.9, seed=4, n=2, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in ("qwen2", "qwen3", "gpt2"):  # tied weights; head norms; learned positions and transposed weights
        make(name, root / name)
        tiny_tokenizer.save(tiny_tokenizer.byte_level(), root / name)
    return root


def open_llm(folder, **changes):
    given = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 200, "block_size": 4, "enable_sleep_mode": True}
    return LLM(folder, **given | changes)


def tokens(llm):
    found = [*llm.generate(prompts(2), PARAMS), *llm.generate(prompts(1), DRAWN)]
    return [output.token_ids for result in found for output in result.outputs]


# Packed in panels of ours, for oneDNN, and in whole numbers.
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen2", {}),
        ("qwen2", {"attention_backend": "reference"}),
        ("gpt2", {"quantization": "int8"}),
        ("qwen2", {"quantize_lm_head": True, "dtype": "bfloat16"}),
        ("qwen3", {"quantization": "int8", "attention_backend": "reference"}),
    ],
)
def test_the_same_tokens_after_both_levels(folders, name, settings):
    with open_llm(folders / name, **settings) as llm:
        before = tokens(llm)
        for level in (1, 2, 1):
            llm.sleep(level)
            llm.wake_up()
            assert tokens(llm) == before


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_under_way_go_on_where_they_were(folders, ranks):
    settings = {"max_model_len": 128, "num_kv_blocks": 200, "block_size": 4, "max_num_batched_tokens": 24}
    config = EngineConfig(str(folders / "qwen3"), device="cpu", tensor_parallel_size=ranks, **settings)
    executor, info = build_executor(config)
    core = EngineCore(info.config, executor, info.eos_token_ids, info.vocab_size, info.num_kv_blocks)
    undisturbed = run(core, {})
    core.reset_prefix_cache()
    assert run(core, {2: 2, 5: 1}) == undisturbed  # the first in the middle of a prompt
    core.close()


def run(core, sleeps):
    """Return the tokens of four requests during which the engine sleeps: step -> level."""
    chosen = defaultdict(list)
    for number, prompt in enumerate(prompts(4)):
        core.add(Request(f"{number}", tuple(prompt), DRAWN, seed=number))
    for step in count():
        if not core.has_unfinished:
            assert step > max(sleeps, default=0)
            return chosen
        if step in sleeps:
            core.sleep(sleeps[step])
            assert not core.step().token_ids
            core.wake_up(["kv_cache"])
            assert core.is_sleeping
            core.wake_up()
            core.check_integrity()
        report = core.step()
        for sequence, token in zip(report.sequences, report.token_ids, strict=True):
            chosen[sequence.request.request_id, sequence.index].append(token)
    return chosen


def test_generation_is_refused_while_it_sleeps_and_sleep_unless_it_was_enabled(folders):
    with open_llm(folders / "qwen3") as llm:
        llm.sleep()
        with pytest.raises(EngineAsleepError, match="wake_up"):
            llm.generate([[5]], PARAMS)
    with (
        open_llm(folders / "qwen3", enable_sleep_mode=False) as llm,
        pytest.raises(ConfigError, match="enable_sleep_mode=True"),
    ):
        llm.sleep()


def test_level_2_reads_what_the_folder_holds_by_then(folders, tmp_path):
    folder = shutil.copytree(folders / "qwen3", tmp_path / "model")
    file = folder / "model.safetensors"
    with open_llm(folder) as llm:
        before, was = tokens(llm), llm._core.fingerprint
        llm.sleep(2)
        file.rename(folder / "away")
        with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
            llm.wake_up()
        assert llm.is_sleeping()
        weights = load_file(folder / "away")
        save_file({name: tensor.flip(0) for name, tensor in weights.items()}, file)
        llm.wake_up()
        assert tokens(llm) != before
        assert weights_of(llm._core.fingerprint) != weights_of(was)
        llm.sleep(2)
        (folder / "away").rename(file)
        llm.wake_up()
        assert (tokens(llm), llm._core.fingerprint) == (before, was)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("config.json", {"rope_theta": 5.0, "use_cache": False}, "another rope_theta than"),
        ("config.json", {"transformers_version": "9", "dtype": "float16", "saved_by": "a trainer"}, None),
        ("tokenizer.json", {"version": "2.0"}, "tokenizer is another one"),
    ],
)
def test_weights_alone_may_change_while_it_sleeps(folders, tmp_path, name, change, told):
    """What decides the layers, or what texts are cut into, counts from the start: routers know it, too."""
    folder = shutil.copytree(folders / "qwen3", tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 10000.0}))
    with open_llm(folder) as llm:
        before, kept = tokens(llm), (folder / name).read_text()
        llm.sleep(2)
        (folder / name).write_text(json.dumps(json.loads(kept) | change))
        if told:
            with pytest.raises(CheckpointError, match=told):
                llm.wake_up()
            assert llm.is_sleeping()
            (folder / name).write_text(kept)
        llm.wake_up()
        assert tokens(llm) == before


def test_a_folder_that_is_written_while_it_is_read_is_refused(folders, monkeypatch):
    reads = iter(["was", "is"])
    with open_llm(folders / "qwen3") as llm:
        llm.sleep(2)
        with monkeypatch.context() as patch:
            patch.setattr("engine.worker.runner.weights_fingerprint", lambda folder, config: next(reads))
            with pytest.raises(CheckpointError, match="changed while its weights were read"):
                llm.wake_up()
        llm.wake_up()


class Beside(SoloGroup):
    """Two ranks, of which the other sends one more than this one."""

    def __init__(self):
        super().__init__()
        self.size = 2

    def broadcast(self, x, src=0, timeout=None):
        return x + src


def test_ranks_that_read_other_weights_do_not_serve_together():
    runner = SimpleNamespace(group=Beside(), _folder=SimpleNamespace(path="model"))
    with pytest.raises(CheckpointError, match="other weights on another rank's node"):
        ModelRunner._meet(runner, "ab")


SLEEPS = """
import json, sys
import psutil
from tests.parity.test_sleep import open_llm, tokens

def resident():
    return psutil.Process().memory_info().rss

with open_llm(sys.argv[1], num_kv_blocks=800, block_size=16, max_num_batched_tokens=256) as llm:
    tensors = llm._core._executor._runner._cache.tensors
    size = sum(one.fill_(0).nbytes for one in tensors)  # as if all blocks had been used
    before, loaded, given_back = tokens(llm), resident(), []
    for level in (1, 2, 1, 2):
        llm.sleep(level)
        given_back.append(loaded - resident())
        llm.wake_up()
        assert tokens(llm) == before
print(json.dumps({"cache": size, "given_back": given_back}))
"""


def test_memory_is_given_back(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5, "vocab_size": 8192}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    config = transformers.Qwen3Config(**sizes, **heads, max_position_embeddings=256, tie_word_embeddings=False)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path)
    weights = (tmp_path / "model.safetensors").stat().st_size

    # In a process of its own: what other tests have freed takes in weights without a page more being resident.
    done = subprocess.run(
        [sys.executable, "-c", SLEEPS, str(tmp_path)], check=True, stdout=subprocess.PIPE, text=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    cache, (first, second, third, fourth) = told["cache"], told["given_back"]
    assert min(weights, cache) > 100e6
    assert min(first, third) > 0.95 * cache
    assert min(second, fourth) > 0.95 * (cache + weights)


@pytest.mark.parametrize("level", [1, 2])
def test_graphs_are_dropped_and_offloaded_weights_are_found_again(folders, monkeypatch, level):
    monkeypatch.setattr("engine.worker.runner.choose_products", lambda *given: None)  # plain products, as on a GPU
    settings = {"max_model_len": 96, "num_kv_blocks": 200, "block_size": 4, "max_num_seqs": 8}
    more = {"max_num_batched_tokens": 64, "attention_backend": "reference", "device": "cpu"}
    runner = ModelRunner(EngineConfig(str(folders / "qwen3"), **settings, **more), SoloGroup())
    for parameter in runner.model.parameters():
        parameter.data = parameter.data.clone()  # numpy, which read them, would keep their memory
    devices = []

    def assemble():
        devices.append(use_graphs(runner, GraphSizes((1, 2, 4, 8), (2, 8))))
        return runner._forward

    runner._offloads = True
    monkeypatch.setattr(runner, "_assemble", assemble)
    assemble()
    info = model_info(runner)
    core = EngineCore(info.config, SoloExecutor(runner), info.eos_token_ids, info.vocab_size, info.num_kv_blocks)
    expected = run(core, {})
    core.reset_prefix_cache()
    model = weakref.ref(runner.model)
    gc.freeze()  # as a rank does when it has started
    try:
        core.sleep(level)
    finally:
        gc.unfreeze()
    if level == 1:
        assert {tensor.untyped_storage().nbytes() for tensor in tensors_of(model())} == {0}
    else:
        assert model() is None, "somebody holds on to the old model"
    core.wake_up()
    assert run(core, {4: level}) == expected
    assert len(devices) == 3
    assert all(device.replays for device in devices)
