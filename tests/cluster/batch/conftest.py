"""Fixtures of batch tests."""

import pytest

from tests.engine.engine_driver import VOCAB
from tests.openai_app import served_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A served model whose replicas are fake; its prompts are token ids."""
    return served_model(tmp_path_factory.mktemp("model"), "tiny", vocab_size=VOCAB, max_model_len=128)
