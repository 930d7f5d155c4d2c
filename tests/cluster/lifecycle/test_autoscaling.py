"""The autoscaling policy: never out of bounds, monotone, no flapping, nothing decided on half the truth."""

import asyncio
from itertools import count, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.admission.capacity import QueueState, together
from cluster.config import parse_config, scaling_settings
from cluster.config_values import ScalingSettings
from cluster.errors import ApiError
from cluster.lifecycle.autoscaling_policy import QueueLoad, ReplicaLoad, Scaler, needed, read_stats, replica_stats
from cluster.lifecycle.serve_autoscaling import ReplicaScaling, autoscaling_config
from cluster.router.directory import ReplicaDirectory
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.router.readiness import ready_body
from cluster.telemetry.step_metrics import StepSpeed
from engine.errors import ConfigError
from engine.report import EngineStats
from tests.cluster.cluster_lab import Lab, until
from tests.engine.engine_driver import request


def bounds(least: int, most: int, **times: float) -> ScalingSettings:
    given = {
        "target_ttft": 2.0,
        "upscale_delay_s": 5.0,
        "downscale_delay_s": 300.0,
        "downscale_to_zero_delay_s": 600.0,
    }
    return ScalingSettings(least, most, **(given | times))


SETTINGS = bounds(1, 8, downscale_delay_s=60)
TICK = 0.5
loads = st.builds(ReplicaLoad, st.floats(0, 100), st.floats(0, 10), st.floats(0, 1))
queues = st.builds(QueueLoad, st.integers(0, 1000), st.floats(0, 1000), st.floats(0, 1000))


def served_by(replicas, load):
    """What `replicas` look like that share a load; 1.0 = one replica is as full as can be."""
    share = load / replicas
    queue = QueueLoad(round(10 * load), 4.0 * (share - 1), 4.0 * (share - 1)) if share > 1 else QueueLoad()
    return [ReplicaLoad(occupancy=min(share, 1.25), kv_usage=min(share, 1.0) / 2)] * replicas, queue


def play(load_at, seconds, starts_in=0.0):
    """Run the policy against a load over time; returns the number of replicas at each look."""
    scaler, target, running, history, ready_at = Scaler(SETTINGS), 1, 1, [], []
    for i in range(round(seconds / TICK)):
        now = i * TICK
        running = min(target, running + sum(1 for at in ready_at if at <= now))
        ready_at = [at for at in ready_at if at > now]
        replicas, queue = served_by(running, load_at(now)) if running else ([], QueueLoad())
        chosen = scaler.decide(1000 + now, target, replicas, queue)
        ready_at += [now + starts_in] * max(0, chosen - target)
        target, running = chosen, min(running, chosen)
        history.append(target)
    return history


def changes(history):
    return sum(1 for a, b in pairwise(history) if a != b)


@pytest.mark.parametrize("period", [4, 10, 20, 40, 80, 110])
def test_a_square_wave_faster_than_the_cool_down_moves_the_number_up_and_leaves_it(period):
    history = play(lambda now: 4.0 if now % period < period / 2 else 0.2, 1200)
    if period > 10:
        assert max(history) >= 4
    settled = history[len(history) // 4 :]
    assert changes(settled) == 0, "no flapping"


def test_a_square_wave_slower_than_the_cool_down_is_followed_once_each_way():
    history = play(lambda now: 4.0 if now % 600 < 300 else 0.2, 3600)
    ups = sum(1 for a, b in pairwise(history) if b > a)
    downs = sum(1 for a, b in pairwise(history) if b < a)
    assert max(history) >= 4 and min(history[1000:]) == 1
    assert downs <= 6 * 2 and ups <= 6 * 3


@settings(max_examples=25)
@given(st.floats(0.05, 6.0), st.floats(0, 60))
def test_a_steady_load_settles_wherever_it_lies_and_however_slowly_replicas_start(load, starts_in):
    history = play(lambda _: load, 500, starts_in=starts_in)
    settled = history[len(history) // 2 :]
    assert changes(settled) == 0
    assert settled[-1] >= min(load, 8) - 0.01, "enough for the load"
    assert settled[-1] <= max(1, 2.6 * load + 1), "and not absurdly many"


def test_a_ramp_up_and_down_is_followed():
    history = play(lambda now: 5 * min(now, 1800 - now) / 900, 2100)
    top = history.index(max(history))
    assert max(history) >= 6
    assert history[:top] == sorted(history[:top])
    assert history[-1] == 1


@given(st.lists(st.tuples(st.lists(loads, max_size=5), queues, st.integers(0, 5), st.floats(0, 100)), max_size=60))
def test_whatever_the_figures_the_bounds_hold(looks):
    scaler, now, target = Scaler(ScalingSettings(2, 5, 1.0, 1.0, 10.0, 10.0)), 0.0, 2
    for replicas, queue, missing, gap in looks:
        now += gap
        target = scaler.decide(now, target, replicas, queue, missing)
        assert 2 <= target <= 5


@given(st.lists(loads, min_size=1, max_size=5), queues, st.integers(0, 4), loads, queues)
def test_more_load_never_asks_for_fewer(replicas, queue, number, more, more_queue):
    i = number % len(replicas)
    one = replicas[i]
    raised = ReplicaLoad(
        one.prefill_wait + more.prefill_wait, one.occupancy + more.occupancy, one.kv_usage + more.kv_usage
    )
    longer = QueueLoad(queue.requests + more_queue.requests, queue.wait + more_queue.wait, queue.age + more_queue.age)
    before = needed(SETTINGS, replicas, queue)
    assert needed(SETTINGS, [*replicas[:i], raised, *replicas[i + 1 :]], queue) >= before
    assert needed(SETTINGS, replicas, longer) >= before


def test_replicas_that_tell_nothing_are_never_taken_away():
    scaler = Scaler(SETTINGS)
    for i in range(1000):
        assert scaler.decide(i, 3, [ReplicaLoad()], QueueLoad(), missing=2) == 3
    assert Scaler(SETTINGS).decide(0, 3, [], QueueLoad(), missing=3) == 3


def test_time_that_is_waited_in_routers_asks_for_more_replicas_but_for_twice_as_many_at_most():
    idle = [ReplicaLoad()] * 3
    assert needed(SETTINGS, idle, QueueLoad(5, 0.0, 3.0)) == pytest.approx(4.5)
    assert needed(SETTINGS, idle, QueueLoad(5, 600.0, 0.0)) == 6
    assert 0 < needed(SETTINGS, idle, QueueLoad(1)) < 1


def test_the_last_replica_goes_only_when_nothing_at_all_was_there_for_long():
    scaler = Scaler(bounds(0, 4, downscale_delay_s=10, downscale_to_zero_delay_s=30))
    decisions = [scaler.decide(i, 1, [ReplicaLoad(kv_usage=0.01 if i == 20 else 0)], QueueLoad()) for i in range(60)]
    assert decisions.index(0) in range(50, 53)
    assert scaler.decide(100, 0, [], QueueLoad()) == 0
    assert scaler.decide(101, 1, [], QueueLoad()) == 1, "what Serve started for a call that waits is left alone"


def test_a_last_replica_that_may_go_sooner_than_others_does():
    scaler = Scaler(bounds(0, 4, downscale_delay_s=30, downscale_to_zero_delay_s=10))
    assert [scaler.decide(i, 1, [ReplicaLoad()], QueueLoad()) for i in range(40)].index(0) == 10
    assert [scaler.decide(100 + i, 2, [ReplicaLoad()] * 2, QueueLoad()) for i in range(40)].index(1) == 30


def test_figures_travel_through_serve_and_odd_ones_are_missing():
    stats = EngineStats(num_running=3, num_waiting=1, kv_blocks_total=10, kv_blocks_free=4, kv_blocks_cached=1)
    told = replica_stats(stats, 8, 0.7, together([QueueState(2, 100, 1.5, 50.0), QueueState(1, 20, 0.1, 10.0)]))
    metrics = {name: {"a": [SimpleNamespace(value=-1), SimpleNamespace(value=value)]} for name, value in told.items()}
    metrics["squadron_occupancy"]["b"] = [SimpleNamespace(value=1.0)]
    metrics["running_requests"] = {"c": []}
    replicas, queue = read_stats(metrics)
    assert replicas == [ReplicaLoad(0.7, 0.5, 0.5)]
    assert queue == QueueLoad(3, 2.0, 1.5)
    assert read_stats({}) == ([], QueueLoad())


def test_serve_calls_the_policy_with_its_settings():
    assert autoscaling_config(bounds(1, 3), 2).initial_replicas == 2
    config = autoscaling_config(bounds(0, 3, upscale_delay_s=0.0), 1)
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (0, None, 3)
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    assert isinstance(policy, ReplicaScaling) or type(policy).__name__ == "ReplicaScaling"
    busy = {name: {"a": [SimpleNamespace(value=1.25)]} for name in replica_stats(EngineStats(), 1, 0, QueueState())}
    bounds_now = {"capacity_adjusted_min_replicas": 0, "capacity_adjusted_max_replicas": 3}
    context = SimpleNamespace(raw_metrics=busy, current_num_replicas=1, target_num_replicas=1, **bounds_now)
    assert policy(context) == (2, {})
    context.capacity_adjusted_max_replicas = 1
    assert policy(context) == (1, {}), "the bounds are those of now, without another policy"


def test_a_policy_holds_no_bounds_with_which_serve_would_take_it_for_another_one():
    assert autoscaling_config(bounds(0, 3), 1).policy == autoscaling_config(bounds(2, 9), 5).policy
    assert autoscaling_config(bounds(0, 3), 1).policy != autoscaling_config(bounds(0, 3, target_ttft=1.0), 1).policy


def test_speed_is_what_a_full_step_computes_and_fades():
    speed = StepSpeed()
    assert speed.seconds_for(1000) == 0.0
    for _ in range(10):
        speed.note(500, 0.1)
    for _ in range(100):
        speed.note(1, 0.05)
    assert speed.seconds_for(10_000) == pytest.approx(2.0, rel=0.05)
    for _ in range(40_000):
        speed.note(1, 0.05)
    assert speed.seconds_for(10_000) > 6


@pytest.mark.parametrize(
    ("given_settings", "named"),
    [
        ({"min_replicas": 1}, "max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"replicas": 3, "max_replicas": 2}, "replicas"),
        ({"replicas": 1, "min_replicas": 2, "max_replicas": 4}, "replicas"),
        ({"max_replicas": 0}, "max_replicas"),
        ({"min_replicas": -1, "max_replicas": 2}, "min_replicas"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(given_settings, named):
    with pytest.raises(ConfigError) as refused:
        parse_config({"model": "demo", **given_settings})
    assert refused.value.flag == named


def test_without_max_replicas_the_number_is_fixed():
    assert scaling_settings(parse_config({"model": "demo", "replicas": 3})) is None
    scaled = parse_config({"model": "demo", "max_replicas": 3, "min_replicas": 0, "downscale_delay_s": 7})
    assert scaling_settings(scaled) == bounds(0, 3, downscale_delay_s=7, downscale_to_zero_delay_s=7)
    assert (scaled.scales_to_zero, scaled.most_replicas) == (True, 3)


def test_a_model_begins_with_its_least_replicas_unless_it_says_with_how_many():
    assert parse_config({"model": "demo", "min_replicas": 2, "max_replicas": 4}).replicas == 2
    assert parse_config({"model": "demo", "min_replicas": 0, "max_replicas": 4}).replicas == 1
    assert parse_config({"model": "demo", "replicas": 3, "min_replicas": 2, "max_replicas": 4}).replicas == 3


# --- demand in a router


async def test_replicas_hear_what_waits_in_the_routers():
    async with Lab(DispatcherConfig(ping_interval=0.02)) as lab:
        replica = await lab.start("a")
        lab.dispatcher.watch_queue(lambda: QueueState(3, 120, 1.5, 60.0))
        await until(lambda: replica.core.queue == QueueState(3, 120, 1.5, 60.0))


async def test_what_waits_is_counted_once_for_all_replicas_that_are_told():
    async with Lab(DispatcherConfig(ping_interval=0.2)) as lab:
        replicas = [await lab.start(f"r{i}") for i in range(8)]
        looks = count(1)
        lab.dispatcher.watch_queue(lambda: QueueState(next(looks)))
        await until(lambda: all(replica.core.queue.requests for replica in replicas))
        assert len({replica.core.queue.requests for replica in replicas}) < len(replicas)


async def test_a_model_without_replicas_is_ready_where_the_next_request_starts_one_until_one_waited_in_vain():
    async with Lab(DispatcherConfig(admission_wait=0.05)) as lab:
        assert ready_body(lab.dispatcher, []) == {"ready": False, "replicas": []}
        assert ready_body(lab.dispatcher, [], cold_start=True) == {"ready": True, "cold": True, "replicas": []}
        waits = []
        lab.dispatcher.call_when_waiting(lambda: waits.append(lab.dispatcher.queue().requests))
        with pytest.raises(ApiError, match="no replica"):
            await lab.collect(request("r", 3))
        assert waits == [1]
        assert ready_body(lab.dispatcher, [], cold_start=True)["ready"] is False


def directory_of(members, known, waiting, found=True):
    register = ReplicaDirectory.__new__(ReplicaDirectory)
    register._members, register._found_one, register._on_demand = frozenset(members), found, True
    register._watch = SimpleNamespace(known=set(known))
    register._dispatcher = SimpleNamespace(queue=lambda: QueueState(waiting))
    return register


@pytest.mark.parametrize(
    ("members", "known", "waiting", "wanted"),
    [("ab", "a", 0, True), ("a", "a", 5, False), ("", "", 0, False), ("", "", 1, True), ("a", "", 0, True)],
)
async def test_a_lease_call_is_pending_only_where_it_finds_a_replica_or_shows_that_one_is_needed(
    members, known, waiting, wanted
):
    register = directory_of(members, known, waiting)
    register._wake = asyncio.Event()
    search = asyncio.create_task(register._until_wanted())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert search.done() is wanted
    search.cancel()
    await asyncio.gather(search, return_exceptions=True)
