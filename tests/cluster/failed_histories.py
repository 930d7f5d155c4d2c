"""Histories under which something went wrong once, each as short as it could be made, with what it showed."""

from __future__ import annotations

from cluster.simulator.history import Arrive, Cut, Drain, History, Kill, Stop

FAILED: dict[str, History] = {
    "a request came while the last replica left and others were expected back: 500, a division by zero": History(
        seed=644,
        routers=1,
        replicas=1,
        events=(
            Arrive(at=1.0235, seed=286277252, prompt=2, tokens=24),
            Cut(at=1.335, router="router-0", replica="replica-0"),
            Drain(at=1.8656, process="replica-0", back=0.05, version=1),
            Arrive(at=1.9692, seed=189653560, prompt=2, tokens=1),
        ),
    ),
    "a router had been stopped, and who came meanwhile waited although its replica counted as heard again": History(
        seed=121344854602,
        routers=1,
        replicas=1,
        events=(
            Stop(at=1.1183, process="replica-0", seconds=4.0),
            Stop(at=1.4325, process="router-0", seconds=2.0),
            Arrive(at=1.7863, seed=677648753, prompt=2, tokens=1),
        ),
        seats=3,
    ),
    "a replica that had come back was idle, and what waited was kept for another one for two seconds": History(
        seed=316,
        routers=1,
        replicas=2,
        ingress=True,
        events=(
            Kill(at=0.2307, process="replica-0", back=3.0),
            Cut(at=1.3314, router="router-0", replica="replica-1"),
            Arrive(at=1.3393, seed=904544447, prompt=2, tokens=1),
            Arrive(at=1.6278, seed=242213382, prompt=2, tokens=1),
        ),
    ),
}
