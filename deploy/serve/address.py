"""Where the server listens, and how to reach it there."""

from __future__ import annotations

import ipaddress
import json
import socket

from cluster.config import ClusterConfig
from engine.errors import ConfigError, flag

KNOCK_SECONDS = 5.0
PROMPT = "What does os.path.join do?"


def free_port(host: str, port: int, setting: str = "port") -> int:
    """Return `port` if it can be listened on, and any free one for 0. Raises `ConfigError` naming the setting."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As the server will do: a port whose last connections have only just closed is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"cannot listen on {host} port {port} ({reason}); choose another {flag(setting)} (0 = any free one) "
                "or --host",
                setting,
            ) from error
        return int(probe.getsockname()[1])


def knock(address: str) -> None:
    """Raise `OSError` at once where a Ray address is closed: Ray takes minutes.

    Addresses without a port (auto) are left to Ray.
    """
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if separator and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def connect_host(host: str) -> str:
    """Return how a URL on this machine names the address that a server listens on."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return str(address) if address.version == 4 else f"[{address}]"


def curl(url: str, config: ClusterConfig) -> str:
    """Return a command to paste that asks a model something."""
    key = ' -H "Authorization: Bearer $SQUADRON_API_KEY"' if config.keyed else ""
    body = {
        "model": config.model_id,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 100,
        "stream": True,
    }
    return f"curl -N {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n  -d '{json.dumps(body)}'"
