"""Hosts on one machine, each with a network of its own: namespaces on a bridge, of which one can be cut off.

Only inside `unshare --user --map-root-user --net` (`NAMESPACE`): nothing of it is seen outside, or left behind. Who
asks the hosts from there has a link of its own to each, which no cut concerns.
"""

from __future__ import annotations

import shutil
import subprocess

BRIDGE = "hosts"
NAMESPACE = ("unshare", "--user", "--map-root-user", "--net")


def namespaces_missing() -> str:
    """Return why network namespaces cannot be used here, "" where they can."""
    if any(shutil.which(name) is None for name in ("unshare", "nsenter", "ip")):
        return "no unshare, nsenter or ip command"
    tried = subprocess.run(
        [*NAMESPACE, "ip", "link", "add", BRIDGE, "type", "bridge"], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip()


class Host:
    """One of them. address: for the others. outside: for who asks it from outside."""

    def __init__(self, number: int) -> None:
        self.address, self.outside = f"10.77.0.{number}", f"10.78.{number}.2"
        self._port = f"port{number}"
        # It says so once it is in its namespace, and holds that open for as long as its input is.
        holding = ["unshare", "--net", "sh", "-c", "echo ready; exec cat"]
        self._holder = subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"
        self.within = ("nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--")
        self._wire(self._port, "cluster", f"{self.address}/24")
        _ip("link", "set", self._port, "master", BRIDGE)
        self._wire(f"way{number}", "outside", f"{self.outside}/24")
        _ip("address", "add", f"10.78.{number}.1/24", "dev", f"way{number}")
        self._inside("link", "set", "lo", "up")

    def cut(self) -> None:
        """Let nothing through between it and the other hosts; both ends see a link that is up."""
        _ip("link", "set", self._port, "nomaster")

    def heal(self) -> None:
        """Put it back."""
        _ip("link", "set", self._port, "master", BRIDGE)

    def _wire(self, here: str, there: str, address: str) -> None:
        _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", str(self._holder.pid))
        _ip("link", "set", here, "up")
        self._inside("address", "add", address, "dev", there)
        self._inside("link", "set", there, "up")

    def _inside(self, *words: str) -> None:
        subprocess.run([*self.within, "ip", *words], check=True)


def hosts(count: int) -> list[Host]:
    """Return so many hosts on one bridge. Their namespaces end with this process."""
    _ip("link", "set", "lo", "up")
    _ip("link", "add", BRIDGE, "type", "bridge", "forward_delay", "0")
    _ip("link", "set", BRIDGE, "up")
    made = [Host(number) for number in range(1, count + 1)]
    for one in made[1:]:
        _until_reached(made[0], one)
    return made


def _until_reached(one: Host, other: Host) -> None:
    probe = f"import socket; s = socket.create_server(('{other.address}', 7)); print(flush=True); s.accept()"
    listening = subprocess.Popen([*other.within, "python3", "-c", probe], stdout=subprocess.PIPE)
    assert listening.stdout is not None
    listening.stdout.readline()
    ask = f"import socket; socket.create_connection(('{other.address}', 7), 20)"
    subprocess.run([*one.within, "python3", "-c", ask], check=True)
    listening.wait()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
