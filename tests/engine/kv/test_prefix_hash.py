import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.block_manager import DIGEST_BYTES, prompt_hashes

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def test_only_full_blocks_are_named():
    assert [len(prompt_hashes(range(n), 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert all(len(digest) == DIGEST_BYTES for digest in prompt_hashes(range(8), 4))


@given(TOKENS, TOKENS, st.sampled_from([1, 2, 4]))
def test_equal_names_mean_equal_prefixes(a, b, size):
    common = sum(x == y for x, y in zip(prompt_hashes(a, size), prompt_hashes(b, size), strict=False))
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common == shared // size


def test_a_block_is_named_after_all_that_comes_before_it():
    a, b = prompt_hashes([1, 2, 9, 9], 2), prompt_hashes([3, 4, 9, 9], 2)
    assert a[1] != b[1]


def test_salt_and_adapter_separate_caches_and_do_not_mix():
    names = {
        prompt_hashes([1, 2], 2, salt, adapter)[0]
        for salt, adapter in ((b"", ""), (b"a", ""), (b"", "a"), (b"ab", ""), (b"a", "b"), (b"b", "a"))
    }
    assert len(names) == 6


def test_lists_tuples_and_arrays_name_alike():
    ids = [5, 70_000, 2**31 - 1, 0]
    assert prompt_hashes(ids, 2) == prompt_hashes(tuple(ids), 2) == prompt_hashes(np.array(ids, np.int32), 2)


def test_names_are_the_same_in_every_process_and_version():
    code = "from engine.kv.block_manager import prompt_hashes; print(prompt_hashes([1, 2, 3, 4], 2, b's')[1].hex())"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert seen == prompt_hashes([1, 2, 3, 4], 2, b"s")[1].hex()
    assert seen == "46a27e65d146fd30e9f3a18b337a1b11426f91cbbccc2665a09e7d7ecad3ef6a"


def test_an_id_that_is_no_token_is_refused():
    with pytest.raises(OverflowError):
        prompt_hashes([2**40, 1], 2)
