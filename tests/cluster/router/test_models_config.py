"""The form of several models: what stands where, what is refused by name, and what comes of it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.schema import ServeDeploySchema

import deploy
from cluster import app as app_module
from cluster.app import build, build_version
from cluster.app_config import APP_WIDE, PER_MODEL, AppConfig, parse_app
from cluster.config import NO_KEYS, ClusterConfig, parse_config
from cluster.lifecycle.updates import ONE_MORE
from cluster.resources import app_resources, deployment_names
from deploy.cli.dry_run import describe_plans, make_plans
from deploy.cli.keys import with_key_file
from deploy.cli.settings_file import merge_settings
from deploy.serve.ray_cluster import check_capacity
from engine.errors import CheckpointError, ConfigError
from parallel.errors import ShardingError

TWO = [{"model": "demo"}, {"model": "demo", "served-model-name": "other", "tensor_parallel_size": 2, "replicas": 3}]


def names(app: AppConfig) -> list[tuple[str, ...]]:
    return [config.names for config in app.models]


def test_what_stands_beside_models_holds_for_all_that_do_not_say_otherwise():
    app = parse_app({"models": TWO, "max-num-seqs": 7, "replicas": 2, "port": 9, "api_key": "k"})
    one, other = app.models
    assert (one.max_num_seqs, one.replicas, one.tensor_parallel_size) == (7, 2, 1)
    assert (other.max_num_seqs, other.replicas, other.tensor_parallel_size) == (7, 3, 2)
    assert names(app) == [("demo",), ("other",)]
    assert {(config.port, config.api_key) for config in app.models} == {(9, "k")}
    assert app.shared.port == 9


def test_every_setting_is_of_the_app_or_of_a_model_and_one_model_needs_no_list():
    assert set(APP_WIDE).isdisjoint(PER_MODEL)
    values = {"model": "demo", "replicas": 2, "port": 8, "tensor-parallel-size": 2}
    app = parse_app(values)
    assert app == AppConfig((parse_config(values),))
    assert not app.listed
    assert parse_app(app.settings()) == app


@pytest.mark.parametrize("count", [1, 2])
def test_what_serve_gets_is_read_back_as_the_same(count):
    app = parse_app({"models": TWO[:count], "routers": 2, "api_key": "k"})
    assert app.listed
    assert parse_app(app.settings()) == app
    assert parse_app(yaml.safe_load(yaml.safe_dump(app.settings()))) == app


@pytest.mark.parametrize(
    ("settings", "words", "flag"),
    [
        ({"models": []}, "models: must be a list of at least one, such as `- model: demo`", "models"),
        ({"models": {"model": "demo"}}, "models: must be a list of at least one", "models"),
        ({"models": None}, "models: must be a list of at least one", "models"),
        ({"models": ["demo"]}, r"models\[0\]: must hold settings such as `model: demo`, not 'demo'", "models"),
        ({"models": TWO, "model": "demo"}, "model and models exclude each other: give each model its own", "model"),
        ({"models": TWO, "served_model_name": "x"}, "served_model_name and models exclude", "served_model_name"),
        ({"models": TWO, "replica": 2}, r"^unknown setting replica; did you mean replicas\?", "replica"),
        (
            {"models": [{"model": "demo"}, {"model": "x", "replica": 2}]},
            r"models\[1\]: unknown setting replica; did you mean replicas\?",
            "replica",
        ),
        (
            {"models": [{"model": "demo", "port": 1}]},
            r"models\[0\].port is a setting of the whole app: put it beside models",
            "port",
        ),
        (
            {"models": [{"model": "demo"}, {"model": "demo", "tensor_parallel_size": 0}]},
            r"^models\[1\].tensor_parallel_size must be at least 1, not 0",
            "tensor_parallel_size",
        ),
        (
            {"models": [{"model": "demo", "replicas": "many"}]},
            r"^models\[0\].replicas: must be a whole number such as 1, not 'many'",
            "replicas",
        ),
        ({"models": [{"model": "demo"}], "dtype": "int3"}, r"^dtype must be one of", "dtype"),
        ({"models": [{"model": "demo"}, {"replicas": 1}]}, r"^models\[1\].model is missing: give a folder", "model"),
        (
            {"models": [{"model": "demo"}, {"model": "/x/demo"}]},
            r"models\[1\].served_model_name: 'demo' is the name of models\[0\] already; .* such as demo-2",
            "served_model_name",
        ),
        (
            {"models": [{"model": "a", "served_model_name": ["x", "y"]}, {"model": "b", "served_model_name": "z,y"}]},
            r"models\[1\].served_model_name: 'y' is the name of models\[0\]",
            "served_model_name",
        ),
        (
            {"models": [{"model": "demo", "tool_call_parser": "xml"}]},
            r"models\[0\].tool_call_parser",
            "tool_call_parser",
        ),
    ],
)
def test_a_wrong_form_is_refused_at_its_place_with_what_works(settings, words, flag):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_app(settings)
    assert caught.value.flag == flag


@pytest.mark.parametrize(
    ("given_", "wanted"),
    [
        ("a", ("a",)),
        ("a,b", ("a", "b")),
        (" a , b/c ", ("a", "b/c")),
        (["a", "b"], ("a", "b")),
    ],
)
def test_a_model_may_have_several_names_and_answers_show_the_first(given_, wanted):
    config = parse_config({"model": "demo", "served_model_name": given_})
    assert config.names == wanted
    assert config.model_id == wanted[0]


@pytest.mark.parametrize("value", ["", ",", "a,", [], ["a", ""], [1], 5])
def test_names_that_are_none_are_refused(value):
    with pytest.raises(ConfigError, match="served_model_name"):
        parse_config({"model": "demo", "served_model_name": value})


def test_the_command_line_wins_over_the_file_in_each_model(tmp_path: Path):
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump({"replicas": 2, "models": TWO}))
    app = merge_settings(path, {"replicas": 5, "port": 77})
    assert [(one.replicas, one.port, one.tensor_parallel_size) for one in app.models] == [(5, 77, 1), (5, 77, 2)]
    with pytest.raises(ConfigError, match="model and models exclude each other"):
        merge_settings(path, {"model": "demo"})


def test_errors_of_a_file_name_the_file_and_the_place(tmp_path: Path):
    path = tmp_path / "two.yaml"
    path.write_text("models:\n- model: demo\n- model: demo\n  served_model_name: b\n  block_size: 17\n")
    with pytest.raises(ConfigError, match=r"two\.yaml: models\[1\]\.block_size must be a power of two"):
        merge_settings(path, {})


def test_a_key_file_and_ports_are_of_all_models(tmp_path: Path):
    path = tmp_path / "keys.yaml"
    path.write_text("- {key: sk-one, tenant: one}\n")
    app = with_key_file(parse_app({"models": TWO, "api_key_file": str(path)}), local=True)
    assert len({config.metrics_key for config in app.models}) == 1
    assert app.shared.metrics_key
    assert app.with_shared(port=5).models[1].port == 5


def test_the_plan_of_two_models_is_a_file_that_gives_the_same_plan():
    app = parse_app({"models": TWO, "device": "cpu", "api_key": "secret"})
    plans = make_plans(app)
    text = describe_plans(app, plans)
    assert "secret" not in text
    assert "# other: " in text
    assert "Places 3 x 2 ranks" in text
    assert "Needs 7.25 CPUs and 0 GPUs" in text
    again = parse_app(yaml.safe_load(text))
    assert names(again) == names(app)
    assert [plan.resolved for plan in make_plans(again)] == [plan.resolved for plan in plans]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"tensor_parallel_size": 7}, ShardingError, r"models\[1\]: .*cannot be split over 7"),
        ({"max_model_len": 10**6}, ConfigError, r"models\[1\].*max_model_len"),
        ({"model": "./nowhere", "served_model_name": "x"}, ConfigError, r"models\[1\]\.model: there is no folder"),
        ({"model": "y" * 200}, CheckpointError, r"models\[1\]: .*neither a folder nor a model"),
    ],
)
def test_what_one_model_cannot_do_is_told_with_its_place(wrong, error, words):
    app = parse_app({"models": [{"model": "demo"}, TWO[1] | wrong], "device": "cpu"})
    with pytest.raises(error, match=words):
        make_plans(app)


def test_a_cluster_too_small_for_all_models_is_refused_with_the_numbers():
    placement = app_resources(parse_app({"models": TWO}), lambda config: config.model_id == "other")
    assert (placement.cpus, placement.gpus) == (7.25, 6)
    check_capacity(placement, {"CPU": 7.25, "GPU": 6}, {})
    with pytest.raises(ConfigError, match=r"1 replica x 1 rank x 1, 3 replicas x 2 ranks x 1 and 1 router need 7.25"):
        check_capacity(placement, {"CPU": 7, "GPU": 6}, {})


def test_deployments_are_called_after_their_models_whatever_else_is_served():
    app = parse_app({"models": TWO})
    assert deployment_names(app) == ["Replica-demo", "Replica-other"]
    assert deployment_names(parse_app({"models": TWO[1:]})) == ["Replica-other"]
    assert deployment_names(parse_app({"model": "demo"})) == ["Replica"]


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters=","), min_size=1), min_size=1, unique=True))
def test_names_of_deployments_are_safe_and_tell_models_apart(given_names):
    cleaned = list(dict.fromkeys(name.strip() for name in given_names if name.strip()))
    app = AppConfig(tuple(ClusterConfig(model="m", served_model_name=[name]) for name in cleaned), listed=True)
    found = deployment_names(app)
    assert len(set(found)) == len(found)
    assert all(
        set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") for name in found
    )


def apart(app):
    """The deployments of an app: of each model, and the router."""
    router = app._bound_deployment
    return [*[one._bound_deployment for one in router.init_args[1]], router]


def test_the_app_has_one_router_and_a_deployment_for_each_model():
    app = build({"models": TWO, "cpus_per_worker": 0.5})
    router = app._bound_deployment
    assert router.name == "Router"
    settings, replicas, built_of, batches = router.init_args
    assert batches is None
    assert [one["served_model_name"] for one in settings] == [("demo",), ("other",)]
    deployments = [one._bound_deployment for one in replicas]
    assert [(one.name, one.num_replicas) for one in deployments] == [("Replica-demo", 1), ("Replica-other", 3)]
    assert [one.init_args[1] for one in deployments] == ["demo", "other"]
    bundles = [one._replica_config.placement_group_bundles for one in deployments]
    assert bundles == [[{"CPU": 0.5}], [{"CPU": 0.5}, {"CPU": 0.5}]]
    versions = [one.version for one in (*deployments, router)]
    rolled_back = build_version(built_of.args, built_of.versions)
    assert [one.version for one in apart(rolled_back)] == versions, "what a rollback deploys is the same version"
    assert len(set(versions)) == 3
    assert not {one.version for one in apart(build(built_of.args))} & set(versions), "a user's deploy restarts all"


@pytest.mark.parametrize(("free", "surges"), [(1.25, [ONE_MORE] * 3), (1.0, [0, 0, 0])])
def test_ray_is_asked_once_for_room_whatever_the_number_of_models(monkeypatch, free, surges):
    asked = []

    def available():
        asked.append(1)
        return {"CPU": free}

    monkeypatch.setattr(app_module.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(app_module.ray, "cluster_resources", dict)
    monkeypatch.setattr(app_module.ray, "available_resources", available)
    models = [TWO[0], TWO[1] | {"tensor_parallel_size": 1}]
    router = build({"models": models, "cpus_per_worker": 0.5})._bound_deployment
    deployments = [*[one._bound_deployment for one in router.init_args[1]], router]
    assert [one._deployment_config.max_surge_percent for one in deployments] == surges
    assert len(asked) == 1


def test_the_serve_config_file_of_two_models_is_one_that_serve_and_we_understand():
    values = yaml.safe_load((Path(deploy.__file__).parent / "configs" / "two_models.yaml").read_text())
    app = ServeDeploySchema.model_validate(values).applications[0]
    module, name = app.import_path.split(":")
    assert callable(getattr(importlib.import_module(module), name))
    config = parse_app(app.args)
    assert names(config) == [("demo", "small"), ("demo-tp2",)]
    assert [one.tensor_parallel_size for one in config.models] == [1, 2]
    assert len(make_plans(config)) == 2


def test_an_app_that_keeps_batches_has_a_deployment_that_runs_them(tmp_path):
    app = build({"models": TWO, "cpus_per_worker": 0.5, "batch_dir": str(tmp_path)})
    settings, replicas, _, batches = app._bound_deployment.init_args
    assert batches._bound_deployment.name == "Batches"
    assert batches._bound_deployment.init_args == (settings, replicas)


def test_sleep_mode_needs_keys_for_the_app_and_not_for_its_parts():
    with pytest.raises(ConfigError, match="--api-key") as refused:
        parse_app({"model": "demo", "enable_sleep_mode": True})
    assert refused.value.flag == "enable_sleep_mode"
    app = parse_app({"model": "demo", "enable_sleep_mode": True, "api_key": "sk-operator"})
    assert parse_config({**app.settings(), **NO_KEYS}).enable_sleep_mode
