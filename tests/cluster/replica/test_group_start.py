"""What a replica refuses before it loads anything."""

from __future__ import annotations

import pytest

from cluster.config import parse_config
from cluster.replica.group_start import listening_host, start_group
from engine.errors import ConfigError


def test_link_host_that_is_no_address_of_this_machine_is_refused_before_the_model_is_read() -> None:
    config = parse_config({"model": "no-such-folder", "link_host": "203.0.113.1"})
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1") as caught:
        start_group(config)
    assert caught.value.flag == "link_host"


def test_link_host_decides_where_links_are_taken() -> None:
    config = parse_config({"model": "demo", "link_host": "127.0.0.2"})
    assert listening_host(config, ["some-other-node"]) == "127.0.0.2"
