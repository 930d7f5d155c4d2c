"""`squadron drain`: announces that a node of a Ray cluster ends soon, by default this machine's."""

from __future__ import annotations

import psutil

from cluster.lifecycle.node_drains import DrainError, drain
from deploy.serve.environment import AUTO, GCS_FLAG, running_rays

NODE_FLAG = "--node_id="


def drain_nodes(name: str | None, deadline: float, address: str | None) -> None:
    """Announce the end of a node and print which. name: None = all nodes of the cluster on this machine.

    address: of the cluster, None or auto = the one that runs here. Raises `DrainError`.
    """
    found = _found(address)
    names = [name] if name is not None else nodes_here(found)
    if not names:
        raise DrainError(f"node: no node of the cluster at {found} runs on this machine; name one")
    for each in names:
        for node in drain(each, deadline, found):
            print(f"node {node} is drained: it ends in {deadline:g} s")


def _found(address: str | None) -> str:
    if address not in (None, AUTO):
        return address
    running = running_rays()
    if len(running) != 1:
        told = f"any of {', '.join(running)}" if running else "none that runs here"
        raise DrainError(f"address: the cluster may be {told}; give its address, such as 10.0.0.1:6379", "address")
    return running[0]


def nodes_here(address: str) -> list[str]:
    """Return the ids of the nodes of a cluster that run on this machine, as their raylets were told.

    address: as it was given: where only one cluster has nodes here, it is that one, by whatever name.
    """
    running = running_rays()
    meant = running[0] if len(running) == 1 else address
    nodes = []
    for process in psutil.process_iter(["name", "cmdline"]):
        words = process.info["cmdline"] or []
        if process.info["name"] == "raylet" and f"{GCS_FLAG}{meant}" in words:
            nodes += [word.removeprefix(NODE_FLAG) for word in words if word.startswith(NODE_FLAG)]
    return nodes
