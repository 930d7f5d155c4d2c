"""Routers, proxies and replicas killed or stopped under 32 requests in every phase, seen as raw bytes.

An answer is whole, or a typed error, or (where the proxy itself died, so that nobody is left to tell) visibly cut:
never a well-formed 200 that is short (FAULTS, kills 3, 11 and 17).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.chaos.ingress_load import ALL, exchanges, late, outcomes
from tests.e2e.harness import App, eventually, proxy_processes, replica_processes, router_processes


@pytest.mark.parametrize(
    ("victims", "sign", "allowed"),
    [
        (router_processes, signal.SIGKILL, set()),
        (router_processes, signal.SIGSTOP, set()),
        (proxy_processes, signal.SIGKILL, {"cut"}),
        (proxy_processes, signal.SIGSTOP, {"cut"}),
        (replica_processes, signal.SIGKILL, set()),
    ],
    ids=["router-killed", "router-stopped", "proxy-killed", "proxy-stopped", "replica-killed"],
)
async def test_no_answer_is_silently_short(
    demo_app: App, victims: Callable[[], list[psutil.Process]], sign: signal.Signals, allowed: set[str]
) -> None:
    def strike() -> None:
        os.kill(victims()[0].pid, sign)

    got, struck = await exchanges(demo_app.port, strike)
    counts = outcomes(got)
    assert set(counts) <= allowed | {"whole"}, counts
    assert counts["whole"] < len(ALL) or not allowed, "all were done before it struck"
    assert not late(got, struck)
    assert all(one.error["retryable"] and one.error["request_id"] for one in got if one.error)
    demo_app.wait_whole()
    eventually(lambda: demo_app.metric("squadron_num_requests_running") == 0, "what the victim ran is aborted")
    eventually(lambda: demo_app.metric("squadron_kv_cache_usage_perc") == 0, "all blocks are free")
