"""`python -m tests.bench.quantised` says what it is at, and keeps that out of its tables."""

from __future__ import annotations

from contextlib import nullcontext

from tests.bench import quantised


def test_rounds_are_told_while_they_take_minutes(monkeypatch, capsys):
    rates = iter(range(1, 100))
    monkeypatch.setattr(quantised, "save_random_model", lambda folder, sizes: None)
    monkeypatch.setattr(quantised, "LLM", lambda *_, **settings: nullcontext(settings))
    monkeypatch.setattr(quantised, "_decode", lambda llm, batch: float(next(rates)))
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    best = quantised.speed(threads=1, rounds=2)
    assert (best["float32 plain 1"], best["bfloat16 int8 8"], best["bfloat16 int4 8"]) == (11.0, 37.0, 39.0)
    told = capsys.readouterr()
    assert told.out == ""
    rounds = [f"speed in {dtype}: round {number} of 2" for dtype in ("float32", "bfloat16") for number in (1, 2)]
    assert told.err.splitlines() == ["speed: making a model of 100M parameters", *rounds]


def test_tables_alone_are_on_stdout(monkeypatch, capsys):
    found = quantised.Distance(0.5, 1.0, 2.0, 1e-3, 0.75, 0.5, 1_000_000)
    rates = {f"{d} {kind} {n}": 1.0 for d in ("float32", "bfloat16") for kind in quantised.WEIGHTS for n in (1, 8)}
    monkeypatch.setattr(quantised, "accuracy", lambda: iter([("float32", found)]))
    monkeypatch.setattr(quantised, "speed", lambda threads, rounds, shape: rates)
    monkeypatch.setattr("sys.argv", ["quantised"])
    quantised.main()
    lines = capsys.readouterr().out.splitlines()
    assert "| float32 | 1.0 | 0.5000 | 1.000 | 2.00 | 1.00e-03 | 75.00% | 50.00% |" in lines
    assert all(not line or line.startswith("|") for line in lines[1:])
