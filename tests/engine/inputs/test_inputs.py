import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.inputs.grammar_masks import MaskMaker
from engine.inputs.prepare import InputBuilder
from engine.report import StepInputs
from engine.request import Request
from engine.sampling.parameter_table import SamplingTable
from engine.sampling_params import SamplingParams
from engine.scheduler.schedule import Schedule
from engine.scheduler.slots import SlotTables
from tests.engine.engine_driver import EOS, VOCAB, Driver, request
from tests.fake_executor import FakeExecutor


class Recorder(FakeExecutor):
    """Keeps copies of what each step was given."""

    def __init__(self, *args):
        super().__init__(*args)
        self.inputs, self.sampling = [], []

    def execute(self, inputs, sampling):
        given = {name: getattr(inputs, name) for name in StepInputs.__slots__}
        copies = {name: value.copy() for name, value in given.items() if value is not None}
        self.inputs.append(StepInputs(**copies))
        taken = {name: getattr(sampling, name) for name in sampling.__slots__}
        copies = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in taken.items()}
        self.sampling.append(type(sampling)(**copies))
        return super().execute(inputs, sampling)


def schedule_of(query_lens, num_computed, num_tokens, slots=None):
    """Return a schedule of rows in `slots`; those draw whose last token is computed."""
    query_lens, num_computed = np.array(query_lens, np.int32), np.array(num_computed, np.int32)
    slots = np.arange(len(query_lens)) if slots is None else np.array(slots)
    rows = (num_computed + query_lens == np.array(num_tokens)).nonzero()[0]
    return Schedule(
        sequences=[],
        slots=slots,
        query_lens=query_lens,
        num_computed=num_computed,
        seq_lens=num_computed + query_lens,
        samples=[],
        sample_rows=rows,
        sample_slots=slots[rows],
        sample_positions=(num_computed + query_lens)[rows],
        num_tokens=int(query_lens.sum()),
        decode=bool((query_lens == 1).all()) and len(rows) == len(slots),
    )


def builder_for(tables, block_size, budget=64):
    masks = MaskMaker(tables.num_slots, VOCAB, drawn=list)
    return InputBuilder(tables, SamplingTable(tables.num_slots), masks, block_size, budget)


# ---- the worked example --------------------------------------------------------------------------------------

PROMPTS = ((10, 11, 12), (20, 21), (30, 31, 32, 33, 34, 35, 36, 37))
STEP_1 = {
    "request_indices": [0, 0, 0, 1, 1, 2, 2, 2, 2, 2],
    "positions": [0, 1, 2, 0, 1, 0, 1, 2, 3, 4],
    "token_indices": [0, 1, 2, 12, 13, 24, 25, 26, 27, 28],
    "input_ids": [10, 11, 12, 20, 21, 30, 31, 32, 33, 34],
    "block_table_indices": [0, 0, 1, 6, 6, 12, 12, 13, 13, 14],
    "block_numbers": [1, 1, 2, 3, 3, 4, 4, 5, 5, 6],
    "offsets": [0, 1, 0, 0, 1, 0, 1, 0, 1, 0],
    "slot_mapping": [2, 3, 4, 6, 7, 8, 9, 10, 11, 12],
}
STEP_2 = {
    "request_indices": [0, 1, 2, 2, 2],
    "positions": [3, 2, 5, 6, 7],
    "token_indices": [3, 14, 29, 30, 31],
    "block_table_indices": [1, 7, 14, 15, 15],
    "block_numbers": [2, 7, 6, 8, 8],
    "offsets": [1, 0, 1, 0, 1],
    "slot_mapping": [5, 14, 13, 16, 17],
}


def worked_example():
    """Run both steps of the example through a whole engine; returns its recorder."""
    recorder = Recorder(16, 2, VOCAB)
    driver = Driver(16, recorder, max_model_len=12, max_num_seqs=3, max_num_batched_tokens=10, block_size=2)
    for i, prompt in enumerate(PROMPTS):
        driver.core.add(request(f"r{i}", prompt, max_tokens=4, ignore_eos=True))
    return driver, recorder, [driver.step(), driver.step()]


@pytest.mark.parametrize("step", [0, 1])
def test_worked_example_token_level_every_row(step):
    tables = SlotTables(3, 12, block_size=2)
    for slot, prompt in enumerate(PROMPTS):
        tables.fill(slot, prompt, (), limit=12)
    tables.blocks[0, :2], tables.blocks[1, :1], tables.blocks[2, :3] = [1, 2], [3], [4, 5, 6]
    query_lens, computed, expected = [3, 2, 5], [0, 0, 0], STEP_1
    if step:
        tables.blocks[1, 1], tables.blocks[2, 3] = 7, 8
        tables.tokens[0, 3], tables.tokens[1, 2] = 40, 41
        query_lens, computed, expected = [1, 1, 3], [3, 2, 5], STEP_2 | {"input_ids": [40, 41, 35, 36, 37]}
    schedule = schedule_of(query_lens, computed, [4, 3, 8])
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    level = builder_for(tables, 2).token_level(schedule, starts)
    assert {name: getattr(level, name).tolist() for name in expected} == expected


def test_worked_example_through_the_engine():
    _, recorder, reports = worked_example()
    first, second = recorder.inputs
    for inputs, tokens in ((first, STEP_1), (second, STEP_2)):
        assert inputs.positions.tolist() == tokens["positions"]
        assert inputs.slot_mapping.tolist() == tokens["slot_mapping"]
        assert inputs.input_ids.dtype == inputs.slot_mapping.dtype == inputs.block_tables.dtype == np.int32
    assert first.input_ids.tolist() == STEP_1["input_ids"]
    drawn = reports[0].token_ids
    assert second.input_ids.tolist() == [drawn[0], drawn[1], 35, 36, 37]


def test_worked_example_request_level():
    _, recorder, reports = worked_example()
    first, second = recorder.inputs
    assert (first.num_reqs, first.num_tokens, np.diff(first.query_start_loc).max()) == (3, 10, 5)
    assert first.query_start_loc.tolist() == [0, 3, 5, 10]
    assert first.seq_lens.tolist() == [3, 2, 5]
    assert first.num_computed_tokens.tolist() == [0, 0, 0]
    assert first.block_tables.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert first.logits_indices.tolist() == [2, 4]
    assert (second.num_reqs, second.num_tokens, np.diff(second.query_start_loc).max()) == (3, 5, 3)
    assert second.query_start_loc.tolist() == [0, 1, 2, 5]
    assert second.seq_lens.tolist() == [4, 3, 8]
    assert second.num_computed_tokens.tolist() == [3, 2, 5]
    assert second.block_tables.tolist() == [[1, 2, 0, 0], [3, 7, 0, 0], [4, 5, 6, 8]]
    assert second.logits_indices.tolist() == [0, 1, 4]
    assert [[s.request.request_id for s in report.sequences] for report in reports] == [
        ["r0", "r1"],
        ["r0", "r1", "r2"],
    ]
    assert [report.num_tokens for report in reports] == [10, 5]


def attention_mask(inputs):
    """Which keys (columns) each query (row) may see, as section 7 of the design draws it.

    In a step of whole prompts, one causal square of the longest query is shared by all requests
    [longest query, longest query]; else there is a row per token [num_tokens, longest key range].
    """
    if not inputs.num_computed_tokens.any():
        return np.tri(int(np.diff(inputs.query_start_loc).max()), dtype=bool)
    return np.arange(inputs.seq_lens.max()) <= inputs.positions[:, None]


def test_worked_example_masks():
    _, recorder, _ = worked_example()
    first, second = map(attention_mask, recorder.inputs)
    assert first.shape == (5, 5)
    assert np.array_equal(first, np.tri(5, dtype=bool))
    assert second.shape == (5, 8)
    assert [row.sum() for row in second] == [4, 3, 6, 7, 8]
    assert all(not row[int(row.sum()) :].any() for row in second)


# ---- SYSTEMS B ---------------------------------------------------------------------------------------------


def test_three_prompts_are_concatenated_without_padding():
    recorder = Recorder(32, 16, VOCAB)
    driver = Driver(32, recorder, max_model_len=128, max_num_batched_tokens=256, block_size=16)
    for i, length in enumerate((48, 44, 43)):
        driver.core.add(request(f"r{i}", length, max_tokens=4, ignore_eos=True))
    driver.step()
    driver.step()
    prefill, decode = recorder.inputs
    assert prefill.num_tokens == 135
    assert (np.count_nonzero(prefill.block_tables, axis=1) == 3).all()
    free = [3 * 16 - length for length in prefill.seq_lens.tolist()]
    assert free == [0, 4, 5]
    assert np.count_nonzero(decode.block_tables, axis=1).tolist() == [4, 3, 3]


def test_block_2759_starts_at_slot_44144():
    tables = SlotTables(1, 32, block_size=16)
    tables.fill(0, range(17), (), limit=32)
    tables.blocks[0] = 7, 2759
    inputs, _ = builder_for(tables, 16).prepare(schedule_of([17], [0], [17]))
    assert inputs.slot_mapping[16] == 44144


# ---- against a per-token reference -------------------------------------------------------------------------


@st.composite
def steps(draw):
    """Return tables with some running rows, and how far each of them is to be computed."""
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    context, slots = draw(st.integers(2, 40)), draw(st.integers(1, 6))
    columns = -(-context // block_size)
    tables = SlotTables(slots, context, block_size)
    used = draw(st.permutations(range(slots)))[: draw(st.integers(1, slots))]
    rows = []
    numbers = iter(draw(st.permutations(range(1, slots * columns + 1))))
    for slot in used:
        total = draw(st.integers(1, context))
        computed = draw(st.integers(0, total - 1))
        tables.fill(slot, draw(st.lists(st.integers(0, 999), min_size=total, max_size=total)), (), limit=context)
        upto = draw(st.integers(computed + 1, total)) if draw(st.booleans()) else total
        held = -(-upto // block_size)
        tables.blocks[slot, :held] = [next(numbers) for _ in range(held)]
        rows.append((slot, computed, upto - computed, total))
    return block_size, tables, rows


@given(steps())
def test_inputs_equal_a_per_token_reference(step):
    block_size, tables, rows = step
    slots, computed, query, total = zip(*rows, strict=True)
    inputs, _ = builder_for(tables, block_size, 256).prepare(schedule_of(query, computed, total, slots))
    ids, positions, mapping, last, starts = [], [], [], [], [0]
    for slot, done, length, known in rows:
        for position in range(done, done + length):
            block, offset = divmod(position, block_size)
            ids.append(int(tables.tokens[slot, position]))
            positions.append(position)
            mapping.append(int(tables.blocks[slot, block]) * block_size + offset)
        starts.append(len(ids))
        if done + length == known:
            last.append(len(ids) - 1)
    width = max(-(-(done + length) // block_size) for _, done, length, _ in rows)
    assert inputs.input_ids.tolist() == ids
    assert inputs.positions.tolist() == positions
    assert inputs.slot_mapping.tolist() == mapping
    assert inputs.query_start_loc.tolist() == starts
    assert inputs.logits_indices.tolist() == last
    assert inputs.seq_lens.tolist() == [done + length for _, done, length, _ in rows]
    assert inputs.num_computed_tokens.tolist() == list(computed)
    assert np.array_equal(inputs.block_tables, tables.blocks[list(slots), :width])
    mask = attention_mask(inputs)
    if any(computed):
        assert mask.tolist() == [[key <= position for key in range(max(inputs.seq_lens))] for position in positions]


# ---- sampling ----------------------------------------------------------------------------------------------


def recorded(*requests, steps=3, **settings):
    recorder = Recorder(64, 4, VOCAB)
    driver = Driver(64, recorder, **settings)
    for one in requests:
        driver.core.add(one)
    reports = [driver.step() for _ in range(steps)]
    return recorder, reports


def test_each_row_carries_its_own_parameters():
    asked = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.5,
    }
    recorder, _ = recorded(
        request("plain", 3, ignore_eos=True),
        request("rich", 5, seed=-(2**63), n=2, ignore_eos=True, **asked),
        steps=2,
    )
    for sampling in recorder.sampling:
        for name, value in asked.items():
            assert getattr(sampling, name).tolist()[1:] == [value, value], name
        assert sampling.temperature[0] == 0.0 and sampling.top_p[0] == 1.0 and sampling.repetition_penalty[0] == 1.0
        assert sampling.seeds.tolist() == [0, -(2**63), -(2**63)]
        assert sampling.choices.tolist() == [0, 0, 1]
        assert sampling.num_logprobs == -1
    assert [s.positions.tolist() for s in recorder.sampling] == [[3, 5, 5], [4, 6, 6]]


def test_greedy_rows_without_penalties_need_no_history():
    recorder, _ = recorded(request("a", 3, ignore_eos=True), request("b", 5, ignore_eos=True), steps=4)
    for sampling in recorder.sampling:
        assert sampling.all_greedy
        assert sampling.histories is None and not sampling.forbidden


def test_histories_are_named_by_row_and_length_and_held_nowhere_but_in_the_cache():
    recorder, _ = recorded(
        request("plain", 6, ignore_eos=True),
        request("long", (7, 8, 9, 9), presence_penalty=1.0, ignore_eos=True),
        request("short", (5, 6), repetition_penalty=1.2, ignore_eos=True),
    )
    for step, sampling in enumerate(recorder.sampling):
        assert [each.tolist() for each in sampling.histories] == [
            [0, 1, 2],
            [6, 4, 2],
            [6 + step, 4 + step, 2 + step],
        ]


def test_longer_bad_words_are_found_by_their_last_token_but_two():
    words = ((7, 8), (5, 6, 7), (1, 5, 6, 7), (9, 5, 6, 8), (4,))
    log = (9, 5, 6)
    resumed = Request("r", (5,), SamplingParams(bad_words="x", bad_words_ids=words, max_tokens=9), resume={0: log})
    recorder, _ = recorded(resumed, steps=1)
    (sampling,) = recorder.sampling
    assert sampling.endings.tolist() == [[0, 6, 7], [0, 6, 8]]
    assert [each.tolist() for each in sampling.pairs[0]] == [[7], [8]]
    assert sampling.forbidden[0].tolist() == [4]


def test_stop_ids_are_forbidden_until_min_tokens():
    recorder, _ = recorded(
        request("free", 3, ignore_eos=True, stop_token_ids=(9,)),
        request("held", 3, min_tokens=2, stop_token_ids=(5,)),
        request("held, no end of sequence", 3, min_tokens=1, ignore_eos=True, stop_token_ids=(6,)),
        steps=3,
    )
    assert [dict(s.forbidden) for s in recorder.sampling] == [{1: (EOS, 5), 2: (6,)}, {1: (EOS, 5)}, {}]


def test_the_most_logprobs_of_any_row_are_asked_for():
    recorder, reports = recorded(
        request("none", 3), request("chosen", 3, logprobs=0), request("five", 3, logprobs=5), steps=1
    )
    assert recorder.sampling[0].num_logprobs == 5
    assert {row: len(entry.top) for row, entry in reports[0].logprobs.items()} == {1: 0, 2: 5}
    assert [entry.token_id for entry in reports[0].logprobs.values()] == reports[0].token_ids[1:]
