"""The real app with the demo's tokenizer around a fake source: what the page is tested against."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from cluster.openai.served_model import ServedModel
from cluster.telemetry.metrics import ReplicaSetStats, ReplicaStats
from deploy.demo import demo_model_path
from engine.report import EngineStats, TokenLogprob
from engine.text.tokenizer import Tokenizer
from tests.fake_source import FakeSource
from tests.openai_app import MODEL

ANSWER = """`os.path.join` puts the parts of a path together with the separator of the system, \
and starts again at every part that is absolute.

```python
import os

print(os.path.join("data", "logs", "today.txt"))  # data/logs/today.txt
print(os.path.join("data", "/logs"))              # /logs
```

It only works on text: nothing is looked up on the disk. 🙂"""


@dataclass
class Speaker(FakeSource):
    """A fake source whose tokens have log-probabilities as models have them, the same for the same token."""

    def _logprob(self, token: int, top: int | None) -> TokenLogprob:
        rng = random.Random(token)
        own = math.log(rng.choice((0.999, 0.97, 0.9, 0.75, 0.5, 0.3, 0.12)))
        rest = -math.expm1(own)
        others = tuple((100 + (token * 7 + i) % 3000, math.log(rest * 0.6 / 2**i)) for i in range((top or 1) - 1))
        ranked = sorted(((token, own), *others), key=lambda one: -one[1])
        return TokenLogprob(token, own, tuple(ranked) if top else ())


def demo_model() -> ServedModel:
    """The demo model's tokenizer, and no model."""
    tokenizer = Tokenizer(str(demo_model_path()))
    return ServedModel(MODEL, tokenizer, max_model_len=2048, vocab_size=tokenizer.vocab_size, created=1_700_000_000)


def speaker(model: ServedModel, *texts: str, **changes: object) -> Speaker:
    """A source that answers the first request with the first text, and so on; the last text stays."""
    eos = model.tokenizer.eos_token_id
    plans = [[*model.tokenizer.encode(text, add_special_tokens=False), eos] for text in texts or (ANSWER,)]
    return Speaker(lambda *_: plans.pop(0) if len(plans) > 1 else plans[0], eos=eos, **changes)


@dataclass
class Replicas:
    """Figures of two replicas that move on with every look. looks: how often they were asked for."""

    looks: int = 0
    ready: tuple[bool, bool] = (True, True)

    def __call__(self) -> ReplicaSetStats:
        self.looks += 1
        busy = EngineStats(
            num_running=7,
            num_waiting=2,
            kv_blocks_total=1000,
            kv_blocks_free=300,
            kv_blocks_cached=280,
            prefix_query_tokens=8000,
            prefix_hit_tokens=5000,
            generated_tokens=1000 + self.looks * 300 + 90 * (self.looks % 3),
        )
        calm = EngineStats(num_running=1, kv_blocks_total=1000, kv_blocks_free=950, generated_tokens=self.looks * 40)
        names = ("squadron-7f3a91", "squadron-c02be4")
        both = zip(names, (busy, calm), self.ready, strict=True)
        return ReplicaSetStats(tuple([ReplicaStats(*one) for one in both]), migrations=3)
