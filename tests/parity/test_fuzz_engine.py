"""Random batches over the families: each request alone in a roomy engine, and all together in a tight one.

A short form of what `make fuzz-engine` does for an hour: for half a minute batches of one rank that are the same each
time, then for as long fresh ones, whose seed is told where one fails.
"""

import secrets
from itertools import count

import pytest

from tests.bench.fuzz_engine import Fuzz

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "ranks"), [(37, 1), (secrets.randbits(30), None)], ids=["known", "fresh"])
def test_what_a_request_is_told_does_not_depend_on_its_company(seed: int, ranks: int | None) -> None:
    print(f"seed {seed}")
    with Fuzz(seed) as fuzz:
        fuzz.run(count(), seconds=30, ranks=ranks)
    assert not fuzz.wrong, f"python -m tests.bench.fuzz_engine --seed {seed} --only {','.join(map(str, fuzz.wrong))}"
    assert fuzz.counts["choices"] > fuzz.counts["batches"] > 0
