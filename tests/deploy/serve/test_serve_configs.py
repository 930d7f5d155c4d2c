"""The files of deploy/configs: what Ray Serve and the app read of each."""

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.app_config import parse_app

FOLDER = Path(__file__).parents[3] / "deploy" / "configs"
FILES = sorted(FOLDER.glob("*.yaml"))


def app_of(path):
    """Return the one application of a file, as Serve's own schema takes it."""
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text())).applications
    return application


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_serve_and_the_app_take_it_as_it_stands(path):
    application = app_of(path)
    assert application.import_path == "cluster.app:build"
    parse_app(application.args)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_tells_the_command_that_deploys_it(path):
    assert f"serve deploy deploy/configs/{path.name}\n" in path.read_text()


def test_there_is_one_for_each_size():
    sizes = {}
    for path in FILES:
        app = parse_app(app_of(path).args)
        sizes[path.stem] = [(one.tensor_parallel_size, one.replicas) for one in app.models]
    assert sizes == {
        "demo": [(2, 2)],
        "multi_node": [(16, 1)],
        "one_gpu": [(1, 1)],
        "tp4": [(4, 2)],
        "two_models": [(1, 1), (2, 1)],
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_open_to_others_asks_for_keys(path):
    config = yaml.safe_load(path.read_text())
    args = app_of(path).args
    assert config["http_options"]["host"] == args.get("host", "127.0.0.1")
    if args.get("host") == "0.0.0.0":
        assert args["api_key_file"]
