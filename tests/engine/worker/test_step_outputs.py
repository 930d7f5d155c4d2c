"""What a step leaves on the device, as it reaches the host."""

import torch

from engine.sampling.sampler import FAILED, STUCK, DeviceLogprobs, DeviceOutputs
from engine.worker.step_outputs import HostSide


def fetched(outputs):
    return HostSide(torch.device("cpu")).fetch(outputs).result()


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_rows_without_a_token_are_named_by_what_went_wrong():
    found = fetched(DeviceOutputs(ints(5, FAILED, 7, STUCK, FAILED)))
    assert found.token_ids.tolist() == [5, 0, 7, 0, 0]
    assert (found.failed, found.stuck) == ((1, 4), (3,))


def test_sound_rows_are_not_copied_on_a_cpu():
    tokens = ints(5, 6)
    found = fetched(DeviceOutputs(tokens))
    assert (found.failed, found.stuck) == ((), ())
    tokens[0] = 9
    assert found.token_ids.tolist() == [9, 6]


def test_a_step_that_drew_nothing_has_no_rows():
    found = fetched(DeviceOutputs(ints()))
    assert (len(found.token_ids), found.failed, found.logprobs, found.pooled) == (0, (), None, None)


def test_figures_come_along():
    figures = DeviceLogprobs(torch.tensor([-0.5]), ints(3, 4)[None], torch.tensor([[-0.5, -1.5]]), ints(7))
    found = fetched(DeviceOutputs(ints(3), figures, figures, torch.ones(1, 2)))
    for told in (found.logprobs, found.prompt_logprobs):
        assert (told.chosen.tolist(), told.top_ids.tolist(), told.top.tolist()) == ([-0.5], [[3, 4]], [[-0.5, -1.5]])
        assert told.ranks.tolist() == [7]
    assert found.pooled.tolist() == [[1.0, 1.0]]
