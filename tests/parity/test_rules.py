"""Rules on a real model: the logits of each draw are, to the bit, those that a loop over its own token log makes.

The logs lie beside keys and values in the cache, so all that moves or ends those is tried: slots and blocks used
again, prefixes found, prompts in chunks, preemption, choices that part, moves to another engine, overlap, two ranks.
"""

from dataclasses import replace

import numpy as np
import pytest

from engine.llm import LLM
from engine.request import Request
from engine.sampling import sampler
from engine.sampling_params import SamplingParams
from tests import tiny_tokenizer
from tests.parity.tiny_models import make

pytestmark = pytest.mark.usefixtures("one_thread")

NEVER = -np.inf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    make("qwen3", path)
    tiny_tokenizer.save(tiny_tokenizer.byte_level(), path)
    return path


@pytest.fixture
def ruled(monkeypatch):
    """Note the logits before and after the rules of each row, by what keys its draw."""
    plain, seen = sampler.apply_rules, {}

    def noted(logits, inputs, forbid, rules):
        before = logits.numpy().copy()
        plain(logits, inputs, forbid, rules)
        keys = zip(inputs.seeds.tolist(), inputs.choices.tolist(), inputs.positions.tolist(), strict=True)
        seen.update(zip(keys, zip(before, logits.numpy().copy(), strict=True), strict=True))

    monkeypatch.setattr(sampler, "apply_rules", noted)
    return seen


def by_loop(logits, params, prompt, output, ends):
    """Return what the rules make of one row, token by token."""
    logits = logits.copy()
    for token, added in params.logit_bias:
        logits[token] += np.float32(added)
    if params.allowed_token_ids:
        logits[[token for token in range(len(logits)) if token not in params.allowed_token_ids]] = NEVER
    if len(output) < params.min_tokens:
        logits[[*ends, *params.stop_token_ids]] = NEVER
    for *begin, last in params.bad_words_ids:
        if len(begin) <= len(output) and list(output[len(output) - len(begin) :]) == begin:
            logits[last] = NEVER
    repetition, frequency, presence = map(
        np.float32, (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    )
    for token in {*prompt, *output}:
        value = logits[token]
        logits[token] = value / repetition if value > 0 else value * repetition
    for token in output:
        logits[token] -= frequency
    for token in {*output}:
        logits[token] -= presence
    return logits


def asked(pick, vocab, number):
    """Return a request with some rules; few ids are likely, so that words are begun and tokens come again."""
    few = pick.choice(vocab, 6, replace=False).tolist()
    words = tuple(tuple(pick.choice(few, pick.integers(1, 5)).tolist()) for _ in range(30))
    params = SamplingParams(
        n=int(pick.integers(1, 4)), temperature=1.0, max_tokens=int(pick.integers(4, 14)), min_tokens=2,
        logit_bias=dict.fromkeys(few, 6.0) if pick.random() < 0.7 else {},
        allowed_token_ids=tuple({*few, *range(0, vocab, 3)}) if pick.random() < 0.3 else (),
        bad_words="x" if number % 3 else (), bad_words_ids=words[: 30 if number % 2 else 4] if number % 3 else (),
        repetition_penalty=float(pick.choice([1, 1.3])), frequency_penalty=float(pick.choice([0, 0.17])),
        presence_penalty=float(pick.choice([0, 0.4])),
    )  # fmt: skip
    head = tuple(range(20)) if pick.random() < 0.5 else ()  # a prefix that others have
    rest = pick.integers(0, vocab, pick.integers(1, 25)).tolist()
    return Request(f"r{number}", (*head, *rest), params, seed=number)


def run(core, requests, moves, pick):
    """Run requests that come one after another, some of which begin anew with their log; return their tokens."""
    logs = {(request.seed, choice): [] for request in requests for choice in range(request.params.n)}
    waiting, live, ended = list(requests), {}, set()
    while waiting or live:
        if waiting and pick.random() < 0.6:
            request = waiting.pop()
            live[request.request_id] = request
            core.add(request)
        report = core.step()
        for sequence, token in zip(report.sequences, report.token_ids, strict=True):
            logs[sequence.request.seed, sequence.index].append(token)
        ended.update((finish.sequence.request.request_id, finish.sequence.index) for finish in report.finished)
        for name, request in list(live.items()):
            left = [choice for choice in range(request.params.n) if (name, choice) not in ended]
            if not left:
                del live[name]
            elif moves and pick.random() < 0.1 and (name, 0) not in ended:
                core.abort(name)
                del live[name]
                resume = {choice: tuple(logs[request.seed, choice]) for choice in left}
                ended.update((f"{name}'", choice) for choice in range(request.params.n) if choice not in left)
                waiting.append(replace(request, request_id=f"{name}'", resume=resume))
    return logs


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": True},
        {"async_scheduling": True, "num_kv_blocks": 24},
        {"enable_prefix_caching": False, "block_size": 8},
        {"async_scheduling": True, "tensor_parallel_size": 2},
        {"attention_backend": "reference"},
    ],
    ids=str,
)
def test_rules_are_those_of_each_rows_own_log(folder, ruled, settings):
    pick = np.random.default_rng(7)
    tight = {"num_kv_blocks": 60, "max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 80}
    with LLM(folder, device="cpu", dtype="float32", **{**tight, "block_size": 4, **settings}) as llm:
        requests = [asked(pick, llm.info.vocab_size, number) for number in range(24)]
        logs = run(llm._core, requests, True, pick)
        stats, ends = llm.stats(), llm.info.eos_token_ids
    assert stats.steps_ahead > 10 or "async_scheduling" not in settings
    assert stats.preemptions > 0 or settings.get("num_kv_blocks") != 24
    checked = 0
    for request in requests:
        prompt = request.prompt_token_ids
        for choice in range(request.params.n):
            log = logs[request.seed, choice]
            for position in range(len(log)):
                found = ruled.get((request.seed, choice, len(prompt) + position))
                if found is not None:
                    expected = by_loop(found[0], request.params, prompt, log[:position], ends)
                    np.testing.assert_array_equal(found[1], expected)
                    checked += 1
    assert checked > 150
