"""Inputs that Ray Data reads: in the order of the file in every reading, refused by name, whoever holds the CPUs."""

import importlib.util
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.orc
import pytest
import ray

from cluster.batch.errors import InputError
from cluster.batch.io.source import open_source

# Ray Data warns of defaults that it sets itself.
pytestmark = pytest.mark.filterwarnings(r"ignore:.*is deprecated:DeprecationWarning:ray\.data\.context")


@pytest.fixture(scope="module", autouse=True)
def replica(serve_port):
    """A replica that holds every CPU, as those of a batch on a Ray of its own do."""

    @ray.remote(num_cpus=int(ray.available_resources()["CPU"]))
    class Replica:
        def ready(self):
            return True

    replica = Replica.remote()
    assert ray.get(replica.ready.remote())
    yield
    ray.kill(replica)


def source_of(*paths):
    return open_source([str(path) for path in paths], Path("nowhere"))


def written(path, data):
    path.write_bytes(data)
    return path


def test_rows_come_in_the_order_of_the_files_in_every_reading(tmp_path):
    rows = [{"n": number, "prompt": f"say {number}"} for number in range(20_000)]
    pa.orc.write_table(pa.Table.from_pylist(rows[8000:]), tmp_path / "b.orc", stripe_size=16 << 10)
    pa.orc.write_table(pa.Table.from_pylist(rows[:8000]), tmp_path / "a.orc", stripe_size=16 << 10)
    source = source_of(tmp_path)
    first = list(source.rows())
    assert [row.fields for row in first] == rows
    assert [row.number for row in first] == list(range(20_000))
    assert first[8000].place == f"{tmp_path}/b.orc row 1"
    assert list(source.rows()) == first
    assert source.needs_ray and not source_of(written(tmp_path / "x.jsonl", b"{}")).needs_ray


def test_a_library_that_is_missing_is_named(tmp_path):
    if importlib.util.find_spec("tensorflow"):
        pytest.skip("tensorflow is here, which TFRecord needs: nothing is missing")
    data = struct.pack("<QI", 1, 0) + b"x" + struct.pack("<I", 0)
    with pytest.raises(InputError, match=r"a\.tfrecord needs a library that is not here.*tensorflow"):
        list(source_of(written(tmp_path / "a.tfrecord", data)).rows())


def test_a_damaged_file_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"a\.orc cannot be read"):
        list(source_of(written(tmp_path / "a.orc", b"not at all" * 100)).rows())
