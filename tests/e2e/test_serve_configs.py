"""A file of deploy/configs as it stands, but for its port, given to a real Ray head: its models answer."""

from __future__ import annotations

import httpx
import pytest
import yaml

from tests.e2e.ray_head import REPOSITORY, RayHead

TWO_MODELS = REPOSITORY / "deploy" / "configs" / "two_models.yaml"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_models_answer_behind_one_address(head: RayHead) -> None:
    with head.serving(yaml.safe_load(TWO_MODELS.read_text())) as app:
        for model in ("demo", "small", "demo-tp2"):
            question = {"model": model, "prompt": "import os", "max_tokens": 8}
            answer = httpx.post(f"{app.url}/v1/completions", json=question, timeout=30, trust_env=False)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] > 0
        ranks = sorted(len(replica["pids"]) for replica in app.ready()["replicas"])
        assert ranks == [1, 2], "the second model is split over two"
