import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.worker.graph_sizes import decode_rows, graph_sizes, mixed_sizes
from tests.parity.test_attention import make_step


def sizes(**values):
    return graph_sizes(EngineConfig("fake", **values))


def test_three_prompts_with_four_outputs_each_are_padded_from_12_to_16():
    assert sizes().fit(12) == 16


def test_the_usual_sizes():
    found = sizes(max_num_seqs=1024)
    assert found.sizes[:7] == (1, 2, 4, 8, 16, 24, 32)
    assert found.sizes[-3:] == (480, 496, 512)
    assert found.at_start == (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
    assert found.fit(513) is None, "larger steps run as they are"


@given(st.integers(1, 700), st.integers(1, 700), st.integers(1, 700))
def test_every_step_that_an_engine_can_make_up_to_512_finds_the_least_size(most, budget, rows):
    found = sizes(max_num_seqs=most, max_num_batched_tokens=budget)
    assert list(found.sizes) == sorted(set(found.sizes))
    assert set(found.at_start) <= set(found.sizes)
    assert found.largest == min(most, budget, 512) == found.at_start[-1]
    fit = found.fit(rows)
    assert fit == min((size for size in found.sizes if size >= rows), default=None)
    if fit is not None:
        assert fit - rows < 16


def test_steps_with_prompts_are_padded_to_a_number_of_tokens():
    found = mixed_sizes(EngineConfig("fake", max_num_batched_tokens=300))
    assert found.sizes == found.at_start == (64, 128, 256)
    assert (found.fit(1), found.fit(65), found.fit(257)) == (64, 128, None)
    assert mixed_sizes(EngineConfig("fake")).largest == 512
    assert not mixed_sizes(EngineConfig("fake", max_num_seqs=8, max_num_batched_tokens=8)).largest
    assert not mixed_sizes(EngineConfig("fake", enforce_eager=True)).largest
    assert not mixed_sizes(EngineConfig("fake", cudagraph_capture_sizes=(1, 64))).largest, "those and no others"


def test_eager_engines_have_none():
    assert sizes(enforce_eager=True).fit(1) is None
    assert sizes(enforce_eager=True).largest == 0


def test_sizes_that_are_given_are_all_captured_at_start():
    found = sizes(cudagraph_capture_sizes=[24, 3, 24, 8])
    assert found.sizes == found.at_start == (3, 8, 24)
    assert (found.fit(4), found.fit(25)) == (8, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cudagraph_capture_sizes": []}, r"one or more numbers from 1, such as .*, not \[\]"),
        ({"cudagraph_capture_sizes": (4, 0)}, r"not \[4, 0\]"),
        ({"cudagraph_capture_sizes": (4, "8")}, "one or more numbers"),
        ({"cudagraph_capture_sizes": "4,8"}, r"one or more numbers from 1, such as .* or \[1, 2, 4, 8\], not '4,8'"),
        ({"cudagraph_capture_sizes": (4, 300)}, "up to 300, but .* no step have more than 256 .* beyond 256"),
        ({"cudagraph_capture_sizes": (9,), "max_num_batched_tokens": 8}, "beyond 8"),
        ({"cudagraph_capture_sizes": (8,), "enforce_eager": True}, "drop one of them"),
    ],
)
def test_sizes_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ConfigError, match=f"cudagraph_capture_sizes .*{message}") as caught:
        sizes(**settings)
    assert caught.value.flag == "cudagraph_capture_sizes"


@pytest.mark.parametrize(
    ("computed", "counts", "wanted", "rows"),
    [
        ([4, 9], [1, 1], [0, 1], 2),
        ([4, 9], [1, 2], [0, 2], None),
        ([0, 9], [1, 1], [1], None),  # a prompt of one token whose state is pooled
        ([4], [2], [0, 1], None),  # a prompt whose log-probabilities are wanted
        ([0, 9], [1, 1], [0, 0], None),  # siblings draw from the last token of their prompt, beside a chunk of one
    ],
)
def test_only_steps_of_one_token_and_its_logits_for_each_sequence_are_decode_steps(computed, counts, wanted, rows):
    step = make_step(computed, counts)
    step.logits_indices = np.array(wanted, np.int32)
    assert decode_rows(step) == rows
