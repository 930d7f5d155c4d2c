"""A tenant's quota outlives the routers that counted it (FAULTS 17)."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import yaml
from ray import serve

from cluster.app import build
from cluster.lifecycle.shared_quotas import EXCHANGE_SECONDS
from tests.e2e.harness import eventually, gone, kill, router_processes

NAME = "quotas"
FREE, BOUND = "sk-free-0123456789abcdef", "sk-bound-0123456789abcdef"
# An answer of so many tokens under such a quota is a debt that takes most of two minutes, however they begin. One
# router that knew nothing of it would let some ninety small requests through, far more than come in an exchange.
QUOTA, ANSWER, BETWEEN = 500, 1500, 45


@pytest.fixture(scope="module")
def url(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo behind two routers, with a tenant that has a quota and one that has none."""
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    bound = {"key": BOUND, "tenant": "bound", "tokens_per_minute": QUOTA}
    keys.write_text(yaml.safe_dump([{"key": FREE, "tenant": "free"}, bound]))
    keys.chmod(0o600)
    settings = {"model": "demo", "routers": 2, "cpus_per_worker": 0.5, "drain_timeout": 5}
    serve.run(build(settings | {"api_key_file": str(keys)}), name=NAME, route_prefix=f"/{NAME}")
    url = f"http://127.0.0.1:{serve_port}/{NAME}"
    eventually(lambda: ask(url, FREE, 1).status_code == 200, "an answer", 60)
    yield url
    serve.delete(NAME)


def ask(url: str, key: str, tokens: int) -> httpx.Response:
    body = {"model": "demo", "prompt": "x", "max_tokens": tokens, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=30)


def test_a_tenant_has_no_quota_anew_when_the_routers_that_counted_it_are_killed(url: str) -> None:
    assert ask(url, BOUND, ANSWER).status_code == 200
    # Whichever router is asked: the one that did not answer hears of it within two exchanges.
    eventually(lambda: refusals(url) == 10, "both routers refuse", 10 * EXCHANGE_SECONDS)
    routers = router_processes(NAME)
    assert len(routers) == 2
    for router in routers:
        kill(router)
    eventually(lambda: all(gone(router.pid) for router in routers), "they have ended")
    eventually(lambda: len(router_processes(NAME)) == 2, "two others", 60)
    eventually(lambda: ask(url, FREE, 1).status_code == 200, "an answer", 60)
    # What comes before a router's first exchange is let through.
    let_through: list[int] = []

    def all_refused() -> bool:
        let_through.append(10 - refusals(url))
        return not let_through[-1]

    eventually(all_refused, "both routers refuse again", 10 * EXCHANGE_SECONDS)
    assert sum(let_through) < BETWEEN


def refusals(url: str) -> int:
    """Of ten requests of the tenant with a quota, how many are refused for it."""
    answers = [ask(url, BOUND, 1) for _ in range(10)]
    return sum(one.status_code == 429 and one.json()["error"]["code"] == "rate_limit_exceeded" for one in answers)
