"""The search for the fastest sizes of the Triton attention kernels, and the table it fills."""

import pytest
import torch

from engine.attention import triton_fit as tuned
from engine.attention.triton_fit import OVERLAPPING, Shape, Tile, Tuning, tuning_of, unmeasured
from tests.bench import tune_attention
from tests.bench.gpu.part_attention import Case
from tests.bench.tune_attention import fastest, seconds
from tests.engine.paged_lab import spec

SHORT, LONG = Case("triton", 1, 8), Case("triton", 2, 40)


def test_the_fastest_is_the_one_with_the_least_product_over_all_cases():
    took = {("a", SHORT): 1.0, ("a", LONG): 100.0, ("b", SHORT): 4.0, ("b", LONG): 20.0}
    assert fastest("ab", [SHORT, LONG], lambda *what: took[what]) == "b"


def test_what_does_not_fit_the_gpu_is_passed_over_and_other_errors_are_not():
    class OutOfResources(Exception):
        pass

    def measure(candidate, case):
        if candidate == "large":
            raise OutOfResources
        if candidate == "wrong":
            raise ValueError("wrong")
        return 1.0

    assert fastest(["large", "small"], [SHORT], measure) == "small"
    with pytest.raises(RuntimeError, match="none"):
        fastest(["large"], [SHORT], measure)
    with pytest.raises(ValueError, match="wrong"):
        fastest(["wrong"], [SHORT], measure)


@pytest.mark.parametrize("case", [LONG, Case("triton", 1, 40, new=40)])
def test_a_candidate_is_timed_at_what_the_engine_would_launch(case, monkeypatch):
    monkeypatch.setattr(tune_attention, "rotations", lambda num_bytes: 1)
    monkeypatch.setattr(tune_attention, "REPEATS", 1)
    tuning = Tuning(Tile(16, 16, 4, 2), Tile(16, 16, 4, 2), 1)
    assert seconds(spec(), tuning, case) > 0


def test_without_a_gpu_nothing_is_tuned_and_that_is_said(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune_attention.main([]) == 1
    assert "no CUDA device" in capsys.readouterr().err


def test_candidates_hold_the_group():
    large = spec(num_heads=100, num_kv_heads=1)
    assert {tile.rows for tile in tune_attention.decode_tiles(large)} == {128}
    assert {tile.rows for tile in tune_attention.prefill_tiles(large)} == {128}


def test_a_measured_tuning_is_taken_where_it_was_measured(monkeypatch):
    s = spec(dtype=torch.bfloat16)
    best = Tuning(Tile(16, 128, 8, 4), Tile(128, 128, 8, 3), 4)
    monkeypatch.setattr(tuned, "MEASURED", {Shape("NVIDIA H200", 16, 2, "bfloat16", False): best})
    assert tuning_of(s, "NVIDIA H200", (9, 0)) == best
    assert tuning_of(s, "NVIDIA L4", (8, 9)) == unmeasured(s, (8, 9))


@pytest.mark.parametrize("tiles", [tune_attention.decode_tiles, tune_attention.prefill_tiles])
def test_what_is_tried_overlaps_loads_and_products(tiles):
    assert {tile.stages for tile in tiles(spec())} > {OVERLAPPING}
    assert min(tile.stages for tile in tiles(spec())) == OVERLAPPING
