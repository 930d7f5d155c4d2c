"""Checkpoints that were made to harm: each is refused by file and tensor, at once, in little memory."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from deploy.demo import demo_model_path
from engine.errors import CheckpointError
from engine.loader.checkpoint import MAX_HEADER_BYTES, check_weight_files, open_model, read_json, tensor_files
from engine.loader.fingerprint import model_fingerprint
from engine.loader.safetensors_file import SafetensorsFile
from engine.models.blueprint import blueprint
from engine.text.tokenizer import load_tokenizer

MODEL_FOLDER = demo_model_path()
DEEP = b"[" * 100_000
FOUR = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
LONG = "a" * 100_000


def entry(**changes) -> bytes:
    return json.dumps({"a": FOUR | changes}).encode()


# Header, what follows it, and words of the refusal.
HEADERS = {
    "outside": (entry(shape=[4000], data_offsets=[0, 4000]), b"1234", "truncated or damaged"),
    "past 2^64": (entry(shape=[1 << 63], data_offsets=[0, 1 << 63]), b"1234", "truncated or damaged"),
    "negative": (entry(data_offsets=[-4, 0]), b"1234", "truncated or damaged"),
    "negative shape": (entry(shape=[-2, -2]), b"1234", "truncated or damaged"),
    "product past 2^64": (entry(shape=[1 << 40, 1 << 40, 0], data_offsets=[0, 0]), b"", "truncated or damaged"),
    "overlapping": (
        json.dumps({"a": FOUR, "b": FOUR | {"data_offsets": [2, 6]}}).encode(),
        b"123456",
        "tensor `b`",
    ),
    "named twice": (entry()[:-1] + b"," + entry()[1:], b"1234", "tensor a is there twice"),
    "no such dtype": (entry(dtype="Q9"), b"1234", "Q9"),
    "dtype of others": (entry(dtype="C64", shape=[1], data_offsets=[0, 8]), b"12345678", "tensor a is of dtype C64"),
    "many axes": (entry(shape=[1] * 100_000, data_offsets=[0, 1]), b"1", "tensor a has 100000 axes"),
    "long name": (
        json.dumps({LONG: FOUR | {"dtype": "F4", "shape": [8]}}).encode(),
        b"1234",
        "is of dtype F4",
    ),
    "truncated": (entry(), b"12", "truncated or damaged"),
    "more than told": (entry(), b"12345678", "truncated or damaged"),
    "deep": (DEEP, b"", "truncated or damaged"),
    "deep inside": (b'{"a":' * 100_000, b"", "truncated or damaged"),
    "a list": (b"[1]", b"", "truncated or damaged"),
    "not UTF-8": (b'{"\xff":1}', b"", "truncated or damaged"),
}


def written(folder: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def read(path: Path) -> None:
    file = SafetensorsFile(path)
    try:
        for name in file.names:
            file.tensor(name)
    finally:
        file.close()


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_lies_is_refused_by_file_and_tensor(tmp_path, case):
    header, data, words = HEADERS[case]
    path = written(tmp_path, header, data)
    with pytest.raises(CheckpointError) as error:
        read(path)
    assert str(path) in str(error.value) and words in str(error.value)
    assert len(str(error.value)) < 1_000


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 100_000_000, 1 << 60, (1 << 64) - 1])
def test_a_header_that_is_too_long_is_not_read(tmp_path, length):
    path = written(tmp_path, b"{}", length=length)
    with path.open("r+b") as file:
        file.truncate(8 + min(length, 1 << 30))  # the file may well have as much: a hole
    for refusing in (read, lambda _: check_weight_files(tmp_path)):
        with pytest.raises(CheckpointError, match=f"{length} bytes, and {MAX_HEADER_BYTES} are the most"):
            refusing(path)


@pytest.mark.parametrize("case", ["deep", "deep inside", "a list", "negative", "not UTF-8"])
def test_a_fingerprint_is_of_no_header_that_lies(tmp_path, case):
    shutil.copy(MODEL_FOLDER / "config.json", tmp_path)
    path = written(tmp_path, *HEADERS[case][:2])
    with pytest.raises(CheckpointError, match="truncated or damaged") as error:
        model_fingerprint(str(tmp_path), "float32")
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="no regular file"):
        read(tmp_path / name) if name.endswith("safetensors") else read_json(tmp_path / name)


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "..", ".", "", "a\0.safetensors", "\ud800.safetensors", "config.json", LONG],
)
def test_an_index_names_weight_files_of_its_folder_alone(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"index\.json: .* is (outside the folder|no name of)") as error:
        tensor_files(tmp_path)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("text", [DEEP, b'{"a":' * 100_000, b"\xef\xbb\xbf{}", b'{"a":' + b"9" * 5000 + b"}", b"\0"])
def test_json_of_odd_shape_is_refused_by_file(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON"):
        read_json(tmp_path / "config.json")


def test_json_without_end_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 34)
    with pytest.raises(CheckpointError, match="are the most that are read"):
        read_json(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", 10**9), ("num_hidden_layers", 10**30), ("vocab_size", 10**30), ("rope_parameters", "x")],
)
def test_a_config_that_asks_for_too_much_is_refused_by_field(tmp_path, field, value):
    config = json.loads((MODEL_FOLDER / "config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"config\.json: {field} must be"):
        blueprint(open_model(str(tmp_path)).config)


@pytest.mark.parametrize("text", [DEEP, b"null", b"\xff", b'{"model": null}', b'{"model": {"vocab": {"a": -1}}}'])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_of_odd_shape_is_refused_in_a_sentence(tmp_path, name, text):
    for path in MODEL_FOLDER.glob("*.json"):
        shutil.copy(path, tmp_path)
    if name == "tokenizer_config.json" and text.startswith(b"{"):
        text = b'{"tokenizer_class": {}}'
    (tmp_path / name).write_bytes(text)
    with pytest.raises(CheckpointError, match="no usable tokenizer") as error:
        load_tokenizer(str(tmp_path))
    assert len(str(error.value)) < 1_000
