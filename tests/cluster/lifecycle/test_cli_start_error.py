"""A replica's reason for not starting travels through tracebacks as one line."""

import traceback

from cluster.lifecycle.start_error import ReplicaStartError, StartFailure, find_start_failure
from engine.errors import CheckpointError, ConfigError


def status_of(error: Exception) -> str:
    """What Serve shows: the traceback as text, with words of its own before it."""
    try:
        raise ReplicaStartError.of(error) from error
    except ReplicaStartError as raised:
        return "The deployment failed to start 1 times in a row. Error:\n" + "".join(
            traceback.format_exception(raised)
        )


def test_the_reason_and_its_flag_are_found_in_a_traceback():
    error = ConfigError("the KV cache holds 32 tokens,\n fewer than max_model_len=64", "max_model_len")
    assert find_start_failure(status_of(error)) == StartFailure(
        "ConfigError", "max_model_len", "the KV cache holds 32 tokens, fewer than max_model_len=64"
    )


def test_an_error_without_a_flag_is_found_too():
    found = find_start_failure(status_of(CheckpointError("model.safetensors: truncated: at byte 7")))
    assert found == StartFailure("CheckpointError", "", "model.safetensors: truncated: at byte 7")


def test_other_tracebacks_and_source_lines_are_not_taken_for_a_reason():
    text = 'raise ReplicaStartError("squadron: ConfigError: port: no")\nRuntimeError: squadron: ConfigError: port: no'
    assert find_start_failure(text) is None
