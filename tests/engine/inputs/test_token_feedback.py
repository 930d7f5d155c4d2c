"""What a step drew, in the inputs of the next one."""

import numpy as np
import pytest
import torch

from engine.inputs.token_feedback import TokenFeedback
from engine.sampling.sampler import FAILED, STUCK
from parallel.group import SoloGroup


def filled(drawn, ids, carried):
    carry = TokenFeedback(SoloGroup())
    carry.keep(torch.tensor(drawn, dtype=torch.int32))
    input_ids = torch.tensor(ids, dtype=torch.int32)
    carry.fill(input_ids, np.array(carried, np.int32).reshape(-1, 2))
    return input_ids.tolist()


@pytest.mark.parametrize(
    ("carried", "expected"),
    [
        ([], [1, 2, 3, 4]),
        ([[0, 0], [1, 1]], [7, 8, 3, 4]),
        ([[0, 0], [1, 1], [2, 2]], [7, 8, 9, 4]),
        ([[0, 1], [1, 2]], [8, 9, 3, 4]),
        ([[3, 0]], [1, 2, 3, 7]),
        ([[0, 0], [2, 1], [3, 2]], [7, 2, 8, 9]),
        ([[1, 2], [3, 0]], [1, 9, 3, 7]),
    ],
)
def test_ids_go_to_their_rows_and_nowhere_else(carried, expected):
    assert filled([7, 8, 9], [1, 2, 3, 4], carried) == expected


@pytest.mark.parametrize("carried", [[[0, 0], [1, 1]], [[1, 0], [0, 1]]])
def test_rows_without_a_token_carry_one_that_every_model_knows(carried):
    assert filled([FAILED, STUCK], [5, 6], carried) == [0, 0]


def test_what_was_drawn_is_not_changed_by_handing_it_on():
    drawn = torch.tensor([FAILED, 3], dtype=torch.int32)
    carry = TokenFeedback(SoloGroup())
    carry.keep(drawn)
    input_ids = torch.zeros(2, dtype=torch.int32)
    carry.fill(input_ids, np.array([[0, 0], [1, 1]], np.int32))
    input_ids += 5
    assert drawn.tolist() == [FAILED, 3]
