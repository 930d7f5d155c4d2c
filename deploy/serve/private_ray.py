"""Which Ray `RAY_ADDRESS` means, where that is one of this machine alone, as `squadron serve` starts it."""

from __future__ import annotations

import ipaddress

import psutil

from engine.errors import ConfigError

AUTO = "auto"
GCS_FLAG = "--gcs-address="


def private_ray(address: str) -> str | None:
    """Return the address of the Ray on loopback that `address` (a host and port, or auto) means; None = another Ray.

    auto means it where no other Ray runs on this machine. Raises `ConfigError` where several on loopback do.
    """
    if address != AUTO:
        return address if on_loopback(address) else None
    running = running_rays()
    private = [one for one in running if on_loopback(one)]
    if len(private) > 1 and private == running:
        raise ConfigError(
            f"RAY_ADDRESS=auto may mean any of {', '.join(private)}, which run here; set it to one of them", "address"
        )
    return private[0] if private and private == running else None


def running_rays() -> list[str]:
    """Return the addresses of all clusters that have a node on this machine, as its raylets were told."""
    found = set()
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet":
            words = process.info["cmdline"] or []
            found |= {word.removeprefix(GCS_FLAG) for word in words if word.startswith(GCS_FLAG)}
    return sorted(found)


def on_loopback(address: str) -> bool:
    """Whether the port of `address` is open on this machine, and to nobody else."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or not _is_loopback(host.strip("[]")):
        return False
    try:
        listening = [one.laddr for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    except psutil.AccessDenied:
        return False  # macOS tells root alone; there Ray keeps to loopback by itself
    hosts = [laddr.ip for laddr in listening if laddr and laddr.port == int(port)]
    return bool(hosts) and all(_is_loopback(one) for one in hosts)


def _is_loopback(host: str) -> bool:
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback
