"""Drains of Ray's nodes: which nodes are to end and when, and the announcement that one is.

Whoever ends a node says so to Ray's control store first: `ray start --block` on SIGTERM, Ray's autoscaler, `ray
drain-node`, `squadron drain`, `POST /drain`. Serve starts other copies then, and stops those on the node. Ray has no
public call for any of this; this is the only file that uses its client of the control store for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.core.generated import autoscaler_pb2
from ray.exceptions import RayError

from engine.errors import InvalidRequestError, SquadronError

ANSWER_SECONDS = 5.0  # that the control store may take
MOST_SECONDS = 86_400
# What Ray's client raises: its own errors and plain ones, and those of what another version lacks.
FAILURES = (RayError, RuntimeError, OSError, AttributeError, TypeError, ValueError)
logger = logging.getLogger(__name__)


class DrainError(InvalidRequestError):
    """A node cannot be drained as it was asked. `param`: what to change."""

    def __init__(self, message: str, param: str = "node") -> None:
        super().__init__(message, param)


class NotDrainedError(SquadronError):
    """Ray did not take a drain in; it can be asked again."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive. names: by which people know it: its id, address, host name, and the name given to Ray."""

    node_id: str
    names: frozenset[str]
    is_head: bool


def ends_soon(nodes: Collection[str], drains: Callable[[], Mapping[str, int]] | None = None) -> bool:
    """Whether one of these nodes, by id, is drained with a deadline: it ends then, whatever runs on it.

    A drain without a deadline waits for what runs there, as Serve does when it moves copies. drains: deadlines
    [ms since 1970, 0 = none] by node id; None = asks Ray. Blocks. Raises one of `FAILURES`.
    """
    draining = (drains or _drains)()
    return any(draining.get(node, 0) for node in nodes)


def own_node() -> str:
    """Return the id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def drain(name: str, deadline: float, address: str | None = None) -> list[str]:
    """Announce that a node ends in `deadline` seconds, and return its id, or those of all nodes of that name.

    name: as of `Node.names`. address: of Ray's control store; None = of the cluster that this process is part of.
    The head is refused: Serve's controller and Ray's own processes cannot go elsewhere. Blocks. Raises `DrainError`
    or `NotDrainedError`.
    """
    if not 0 <= deadline <= MOST_SECONDS:
        raise DrainError(f"deadline must lie between 0 and {MOST_SECONDS} seconds, not {deadline:g}", "deadline")
    drained: list[str] = []
    try:
        client = _client(address)
        for node in _meant(name, _alive(client)):
            _drain(client, node, deadline)
            drained.append(node.node_id)
    except NotDrainedError as error:
        raise NotDrainedError(f"{error}{_already(drained)}") from error
    except FAILURES as error:
        told = str(error) or type(error).__name__
        raise NotDrainedError(f"Ray's control store does not answer: {told}{_already(drained)}") from error
    return drained


def _already(drained: Collection[str]) -> str:
    return f"; already drained: {', '.join(drained)}" if drained else ""


def _meant(name: str, nodes: Collection[Node]) -> list[Node]:
    meant = [node for node in nodes if name in node.names]
    if not meant:
        known = sorted({min(node.names, key=len) for node in nodes if not node.is_head})
        raise DrainError(f"node: no node of this cluster that is alive is called {name[:200]!r}; there are {known}")
    if any(node.is_head for node in meant):
        raise DrainError(f"node: {name!r} is the head, which cannot be drained; name a node of workers")
    return meant


def _alive(client: Any) -> list[Node]:
    found = client.get_all_node_info(timeout=ANSWER_SECONDS)
    return [
        Node(
            node_id.hex(),
            frozenset({node_id.hex(), info.node_manager_address, info.node_manager_hostname, info.node_name}) - {""},
            info.is_head_node,
        )
        for node_id, info in found.items()
        if info.state == info.ALIVE
    ]


def _drain(client: Any, node: Node, deadline: float) -> None:
    accepted, why = client.drain_node(
        node.node_id,
        autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,
        "announced to Squadron",
        max(1, int((time.time() + deadline) * 1000)),
        timeout=ANSWER_SECONDS,
    )
    if not accepted:
        raise NotDrainedError(f"node {node.node_id} refuses to be drained: {why}")
    logger.info("node %s is drained: it ends in %g s", node.node_id, deadline)


def _client(address: str | None) -> Any:
    if address is not None:
        return ray._raylet.GcsClient(address=address)
    return ray._private.worker.global_worker.gcs_client


def _drains() -> Mapping[str, int]:
    return dict(_client(None).get_draining_nodes(timeout=ANSWER_SECONDS))
