"""Drives an `EngineCore` on the fake model, and says what it should have produced."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from cluster.accounts.costs import EngineCosts
from cluster.accounts.engine_accounts import EngineAccounts
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.report import Finish, StepReport, TokenLogprob
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from engine.worker.executor import Executor
from tests.engine.late_executor import LateExecutor
from tests.fake_executor import FakeExecutor, fake_token

VOCAB = 61
EOS = 0
Key = tuple[str, int]  # request id, choice


class Driver:
    """An engine and all that it reported, by sequence. Integrity is checked after every step."""

    def __init__(self, num_blocks: int = 64, executor: Executor | None = None, **settings: Any) -> None:
        config = EngineConfig(
            "fake",
            **{"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16, "block_size": 4, **settings},
        )
        self.now = 0.0
        fake = LateExecutor if config.overlaps else FakeExecutor
        self.executor = executor or fake(num_blocks, config.block_size, VOCAB)
        self.core = EngineCore(config, self.executor, (EOS,), VOCAB, num_blocks, clock=lambda: self.now)
        self.accounts = EngineAccounts(lambda: self.now)
        self.core.call_on_event(self.accounts.note)
        self.tokens: dict[Key, list[int]] = defaultdict(list)
        self.logprobs: dict[Key, list[TokenLogprob]] = defaultdict(list)
        self.finished: dict[Key, Finish] = {}

    def step(self) -> StepReport:
        """Run a step and note what it brought."""
        self.now += 1.0
        report = self.core.step()
        self.core.check_integrity()
        self.accounts.check_integrity()
        for row, (sequence, token) in enumerate(zip(report.sequences, report.token_ids, strict=True)):
            key = sequence.request.request_id, sequence.index
            assert key not in self.finished, "a token after the end"
            self.tokens[key].append(token)
            if row in report.logprobs:
                self.logprobs[key].append(report.logprobs[row])
        for finish in report.finished:
            key = finish.sequence.request.request_id, finish.sequence.index
            assert key not in self.finished, "a second end"
            self.finished[key] = finish
        return report

    def drain(self, most: int = 5000) -> None:
        """Step until nothing is left to do."""
        for _ in range(most):
            if not self.core.has_unfinished:
                return
            self.step()
        raise AssertionError(f"not done after {most} steps: {self.core.stats()}")

    def run(self, *requests: Request) -> dict[Key, list[int]]:
        """Add requests, run them to their end and return their tokens."""
        for request in requests:
            self.core.add(request)
        self.drain()
        return self.tokens

    def costs(self) -> EngineCosts:
        """Return the accounts as they are now."""
        self.core.emit_time()
        return self.accounts.costs()

    def reason(self, request_id: str, choice: int = 0) -> FinishReason:
        """Return why a sequence ended."""
        return self.finished[request_id, choice].reason


def request(request_id: str, prompt: int | tuple[int, ...], seed: int = 0, **params: Any) -> Request:
    """Return a request; a number stands for a prompt of so many tokens. `max_tokens` is 8 unless given."""
    tokens = tuple(1 + i % (VOCAB - 1) for i in range(prompt)) if isinstance(prompt, int) else prompt
    return Request(request_id, tokens, SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params}), seed=seed)


def long_request(name: str, **params: Any) -> Request:
    """Return a request for 30 tokens, whatever they are."""
    return request(name, 5, **{"max_tokens": 30, "ignore_eos": True, "temperature": 1.0, **params})


def expected(request: Request, choice: int = 0, log: tuple[int, ...] = ()) -> list[int]:
    """Return what the fake model says to a request without penalties, computed token by token without an engine."""
    params, tokens, outputs = request.params, list(request.prompt_token_ids), list(log)
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    tokens += log
    while len(outputs) < (params.max_tokens or 0):
        token = fake_token(tokens, VOCAB, None if params.greedy else (request.seed, choice))
        while token in stops and len(outputs) < params.min_tokens:
            token = (token + 1) % VOCAB
        outputs.append(token)
        tokens.append(token)
        if token in stops:
            break
    return outputs[len(log) :]
