"""What joins the GPUs of a tensor-parallel group, and the least time of a sum over it.

Bandwidths are the vendor's, one way of one GPU: half of what data sheets call bidirectional.

- NVLink 3, 4 and 5: data sheets of A100 (600 GB/s), H100 and H200 (900 GB/s), and HGX B200 (1.8 TB/s), SXM, whose
  NVSwitch joins the eight of a board; "NVIDIA GB200 NVL72", data sheet: 72 of a rack.
- Bridges: 600 GB/s for two A100-PCIe, H100-PCIe or H100-NVL; 900 GB/s for up to four H200-NVL (their data sheets).
- PCIe 4.0 and 5.0 with 16 lanes: 64 and 128 GB/s both ways (the data sheets of L4 and RTX PRO 6000). Of GPUs that
  bridges may join in pairs, such as A30, A40 and RTX-A6000, PCIe is counted.
- Between nodes: one port of InfiniBand NDR for each GPU, 400 Gb/s ("NVIDIA ConnectX-7", data sheet). NCCL's rings
  leave a node by all its ports at a time.

Latencies are those with which NCCL chooses among its algorithms (NVIDIA/nccl, src/graph/tuning.cc, commit 01afd20,
`baseLat` and `hwLat`: rings of protocol LL): 3.6 us of any sum, and for each hop 0.47 us over NVLink, 1 us over PCIe,
2.7 us over a network. A ring over several nodes has 2 (nodes - 1) hops of a network, and its others take 1 us at
least (src/tuning/ring.cc, `nInterSteps` and `netOverhead`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

NCCL_SECONDS = 3.6e-6  # of any sum by NCCL
ON_HOST = 8  # GPUs of one host that PCIe joins at most


@dataclass(frozen=True, slots=True)
class Link:
    """One kind of link.

    bandwidth: GB/s one way of one GPU. hop: seconds from a GPU to the next. ranks: most it joins.
    sums: whether its switch adds what it passes on (NVLink SHARP, from NVLink 4 on), so that no GPU sends twice.
    one_shot: whether GPUs read each other's memory, as sums in one kernel do (`parallel.symmetric`); over PCIe that
    depends on the board, and is not counted on. wider: what joins more GPUs than that. network: whether it joins
    nodes. inside: of a network, what joins the GPUs of a node; None = a node has one.
    """

    name: str
    bandwidth: float
    hop: float
    ranks: int
    sums: bool = False
    one_shot: bool = True
    wider: Link | None = None
    network: bool = False
    inside: Link | None = None

    def sum_seconds(self, size: int, ranks: int, at_once: int = 0) -> float:
        """Return the least seconds of an all-reduce of `size` bytes.

        at_once: largest message, in bytes, that goes in one shot; there each rank reads the message of every other.
        A ring sends 2 (n - 1) / n times the message (nccl-tests, doc/PERFORMANCE.md), a switch that adds sends it
        once.
        """
        if ranks == 1:
            return 0.0
        if self.inside is not None:
            return self._over_nodes(self.inside, size, ranks)
        rate = self.bandwidth * 1e9
        sent = 1.0 if self.sums and ranks > 2 else 2 * (ranks - 1) / ranks
        hops = 2 if self.sums and ranks > 2 else 2 * (ranks - 1)
        by_nccl = NCCL_SECONDS + hops * self.hop + sent * size / rate
        if not self.one_shot or size > at_once:
            return by_nccl
        return min(by_nccl, 2 * self.hop + (ranks - 1) * size / rate)

    def _over_nodes(self, inside: Link, size: int, ranks: int) -> float:
        rate = min(inside.bandwidth, inside.ranks * self.bandwidth) * 1e9
        hops, across = 2 * (ranks - 1), 2 * (math.ceil(ranks / inside.ranks) - 1)
        latency = NCCL_SECONDS + across * self.hop + (hops - across) * max(inside.hop, BESIDE_NETWORK_HOP)
        return latency + hops / ranks * size / rate

    def for_ranks(self, ranks: int) -> Link:
        """Return the slowest link in a group of so many GPUs."""
        if ranks <= self.ranks or self.wider is None:
            return self
        return replace(self.wider, inside=self) if self.wider.network else self.wider.for_ranks(ranks)

    def within_nodes(self, gpus: int) -> Link:
        """Return this link where a node has so many GPUs: a larger group goes over the network.

        A link that joins more than one host, as that of a rack does, stays what it is.
        """
        if self.wider is None or self.ranks > ON_HOST:
            return self
        return replace(self, ranks=min(self.ranks, gpus), wider=self.wider.within_nodes(gpus))


NVLINK_HOP, PCIE_HOP, NETWORK_HOP = 0.47e-6, 1e-6, 2.7e-6
BESIDE_NETWORK_HOP = 1e-6  # at least, of a hop within a node where others leave it
NETWORK = Link("InfiniBand NDR", 50, NETWORK_HOP, 1 << 16, one_shot=False, network=True)
PCIE_4 = Link("PCIe 4.0", 32, PCIE_HOP, ON_HOST, one_shot=False, wider=NETWORK)
PCIE_5 = Link("PCIe 5.0", 64, PCIE_HOP, ON_HOST, one_shot=False, wider=NETWORK)
NVLINK_3 = Link("NVLink 3", 300, NVLINK_HOP, 8, wider=NETWORK)
NVLINK_4 = Link("NVLink 4", 450, NVLINK_HOP, 8, sums=True, wider=NETWORK)
NVLINK_5 = Link("NVLink 5", 900, NVLINK_HOP, 8, sums=True, wider=NETWORK)
NVLINK_5_RACK = Link("NVLink 5", 900, NVLINK_HOP, 72, sums=True, wider=NETWORK)
BRIDGE_OF_A100 = Link("an NVLink bridge", 300, NVLINK_HOP, 2, wider=PCIE_4)
BRIDGE_OF_H100 = Link("an NVLink bridge", 300, NVLINK_HOP, 2, wider=PCIE_5)
BRIDGE_OF_H200 = Link("an NVLink bridge", 450, NVLINK_HOP, 4, wider=PCIE_5)
