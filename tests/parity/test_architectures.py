import pytest

from engine.config import EngineConfig
from engine.worker.runner import ModelRunner
from parallel.group import SoloGroup
from tests.parity.stepping import Sequence, Stepper
from tests.parity.tiny_models import CONFIGS, check_against, make, prompts

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = make(request.param, folder)
    config = EngineConfig(str(folder), num_kv_blocks=200, block_size=4, device="cpu")
    return model, Stepper(ModelRunner(config, SoloGroup()))


def test_ragged_batch_matches_transformers(pair):
    model, stepper = pair
    ragged = prompts(7)
    sequences = stepper.generate(ragged, 8)
    check_against(model, sequences, ragged)
    stepper.release(sequences)


def test_chunked_prefill_beside_decodes_matches_transformers(pair):
    model, stepper = pair
    ragged = [*prompts(4, seed=1), [5, 6, 7] * 12]
    sequences = [Sequence(list(prompt)) for prompt in ragged]
    left = dict.fromkeys(range(len(ragged)), 5)
    turn = 0
    while left:
        turn += 1
        plan = {}
        for i in left:
            todo = len(sequences[i].tokens) - sequences[i].computed
            plan[i] = min(todo, 3 + (i + turn) % 6)
        before = [len(s.tokens) for s in sequences]
        stepper.step(plan, sequences)
        for i in plan:
            if len(sequences[i].tokens) > before[i]:
                left[i] -= 1
        left = {i: n for i, n in left.items() if n}
    check_against(model, sequences, ragged)
    stepper.release(sequences)


def test_cached_prefix_matches_transformers(pair):
    model, stepper = pair
    prefix = prompts(1, seed=2)[0] + [9] * 16
    prefix = prefix[: len(prefix) // stepper.block_size * stepper.block_size]
    first = stepper.generate([[*prefix, 3]], 2)
    shared = first[0].blocks[: len(prefix) // stepper.block_size]
    tails = [[4], [5, 6, 7], list(range(10, 31)), [8] * 9]
    sequences = [Sequence([*prefix, *tail], computed=len(prefix), blocks=list(shared)) for tail in tails]
    stepper.step({i: len(tail) for i, tail in enumerate(tails)}, sequences)
    for _ in range(3):
        stepper.step(dict.fromkeys(range(len(tails)), 1), sequences)
    check_against(model, sequences, [[*prefix, *tail] for tail in tails])
    stepper.release(sequences)


def test_copied_block_parts_from_its_source(pair):
    model, stepper = pair
    prompt = [7, 8, 9, 10, 11, 12]
    source = stepper.generate([prompt], 1)[0]
    forks = []
    for token in (20, 30):
        fork = Sequence([*prompt, token], computed=len(prompt), blocks=[source.blocks[0], stepper.free.pop()])
        stepper.copies.append((source.blocks[1], fork.blocks[1]))
        forks.append(fork)
    stepper.step({0: 1, 1: 1}, forks)
    check_against(model, forks, [[*prompt, 20], [*prompt, 30]])
    stepper.release([source, *forks])
