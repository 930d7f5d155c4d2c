import math

import numpy as np
import torch

from engine.sampling.gumbel import gumbel, row_keys


def keys(seed=0, choice=0, position=0, count=1):
    positions = np.arange(position, position + count, dtype=np.int32)
    return row_keys(np.full(count, seed, np.int64), np.full(count, choice, np.int32), positions)


def uniforms(noise):
    return torch.exp(-torch.exp(-noise))


def test_noise_is_the_same_alone_and_in_company():
    together = torch.from_numpy(np.concatenate([keys(1), keys(2), keys(-(2**63)), keys(2**63 - 1)]))
    ids = torch.arange(300)[None]
    alone = [gumbel(key[None], ids[:, 100:101]) for key in together]
    torch.testing.assert_close(torch.cat(alone)[:, 0], gumbel(together, ids)[:, 100], rtol=0, atol=0)


def test_noise_never_changes_between_releases():
    # A migrated request must go on with the tokens that another version of the server would have drawn.
    assert keys(seed=42, choice=3, position=17).tolist() == [-5799095290086323731]
    found = gumbel(torch.from_numpy(keys(seed=42)), torch.tensor([[0, 1, 2**32]]))
    expected = torch.tensor([[1.2711008896725944, 0.21447479342031078, 2.6483416432719973]], dtype=torch.float64)
    torch.testing.assert_close(found, expected)


def test_every_part_of_the_key_matters():
    base = keys(seed=5, choice=1, position=9)
    others = [
        keys(seed=6, choice=1, position=9),
        keys(seed=5, choice=2, position=9),
        keys(seed=5, choice=1, position=8),
    ]
    swapped = [keys(seed=5, choice=9, position=1), keys(seed=9, choice=1, position=5)]
    assert all(base[0] != other[0] for other in [*others, *swapped])


def test_neighbouring_keys_and_ids_give_independent_uniform_noise():
    u = uniforms(gumbel(torch.from_numpy(keys(seed=7, count=400)), torch.arange(500)[None]))
    assert u.min() > 0
    assert u.max() < 1
    counts = torch.histc(u.float(), bins=100, min=0, max=1)
    expected = u.numel() / 100
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 99 + 5 * math.sqrt(2 * 99)  # mean 99, five standard deviations
    down = torch.corrcoef(torch.stack([u[1:].flatten(), u[:-1].flatten()]))[0, 1]
    along = torch.corrcoef(torch.stack([u[:, 1:].flatten(), u[:, :-1].flatten()]))[0, 1]
    assert abs(down) < 5 / math.sqrt(u.numel())
    assert abs(along) < 5 / math.sqrt(u.numel())


def test_gumbel_has_its_mean_and_variance():
    noise = gumbel(torch.from_numpy(keys(seed=3, count=200)), torch.arange(1000)[None])
    assert abs(noise.mean() - 0.5772157) < 5 * 1.2825 / math.sqrt(noise.numel())
    assert abs(noise.var() - math.pi**2 / 6) < 0.05
