"""Histories under which something went wrong once, each as short as it could be made, with what it showed.

Where the name of one has a second part, it says what holds since.
"""

from __future__ import annotations

from cluster.admission.keys import Quota
from cluster.simulator.history import (
    Arrive,
    Cut,
    Drain,
    EngineDies,
    History,
    Kill,
    Leap,
    LetGo,
    Partition,
    Slow,
    Stop,
)

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
    "a router stood still, its successor answered, and both charged it; now who may have been left charges nothing": (
        History(
            seed=2071,
            routers=1,
            replicas=1,
            ingress=True,
            events=(
                Arrive(at=0.0184, seed=788363555, prompt=2, tokens=12),
                Stop(at=0.2009, process="router-0", seconds=8.0),
            ),
        )
    ),
    "a router stood still before it told of a prompt: charged twice; now who was left gives it back": History(
        seed=2318,
        routers=2,
        replicas=1,
        ingress=True,
        events=(
            Arrive(at=0.9233, seed=330767076, prompt=2, tokens=1),
            Arrive(at=1.0111, seed=783012410, prompt=60, tokens=1, router=1),
            Stop(at=1.0799, process="router-1", seconds=8.0),
        ),
    ),
    "two replicas died under a request, a connection broke: quarantined; now Serve says what has died": (
        History(
            seed=1126,
            routers=1,
            replicas=1,
            events=(
                Arrive(at=0.0317, seed=151858681, prompt=60, tokens=1),
                EngineDies(at=0.0783, process="replica-0", back=0.05),
                Arrive(at=0.158, seed=85422616, prompt=2, tokens=6),
                Kill(at=0.2545, process="replica-0", back=0.05),
                Cut(at=0.3914, router="router-0", replica="replica-0"),
            ),
        )
    ),
    "replicas died, another could not be linked, and nobody said so; now who is out of Serve's set has died": History(
        seed=1838,
        routers=1,
        replicas=2,
        events=(
            Arrive(at=1.3733, seed=201174063, prompt=2, tokens=1, poison=True),
            Cut(at=1.3734, router="router-0", replica="replica-1"),
            Partition(at=1.698, router="router-0", replica="replica-1", seconds=4.0),
        ),
    ),
    "a replica died after Serve had let it go, and no word came of it: waited on; now what was said before counts": (
        History(
            seed=942706767083,
            routers=1,
            replicas=1,
            events=(
                Arrive(at=0.3102, seed=485448614, prompt=2, tokens=24, choices=2),
                Stop(at=0.3162, process="replica-0", seconds=0.6),
                Arrive(at=0.4116, seed=924362945, prompt=60, tokens=6),
                Arrive(at=0.6844, seed=539369634, prompt=2, tokens=1, stream=False, poison=True),
                Drain(at=0.7307, process="replica-0", back=1.0, version=1),
            ),
        )
    ),
    "a router let go of answers, and charged for what its successor gave; now it leaves that to the other": History(
        seed=1507,
        routers=2,
        replicas=4,
        ingress=True,
        seats=3,
        events=(
            Arrive(at=0.1411, seed=578464791, prompt=2, tokens=1),
            Arrive(at=0.3595, seed=281565317, prompt=2, tokens=12, router=1),
            Stop(at=0.5769, process="replica-2", seconds=4.0),
            LetGo(at=1.9867, process="router-1"),
        ),
    ),
    "a proxy died, and a request that waited for a replica of its model was counted on; now its router hears of it": (
        History(
            seed=3014824,
            routers=1,
            replicas=1,
            ingress=True,
            events=(
                Arrive(at=0.0314, seed=916986817, prompt=2, tokens=24, router=2),
                Kill(at=0.0625, process="holder", back=0.05),
                Drain(at=0.0686, process="replica-0", back=0.5, version=2),
                Stop(at=0.3126, process="replica-0", seconds=4.0),
            ),
        )
    ),
    "a replica had come back, and who stood in line was let in half a second later; now within 0.2 s": History(
        seed=6004522,
        routers=2,
        replicas=2,
        ingress=True,
        seats=3,
        events=(
            Arrive(at=0.0757, seed=536351083, prompt=2, tokens=1, router=1),
            Partition(at=0.2215, router="router-0", replica="replica-1", seconds=4.0),
            Kill(at=0.2312, process="replica-0", back=1.0),
            Arrive(at=0.793, seed=615266087, prompt=2, tokens=1, router=1, stream=False),
            Arrive(at=0.9609, seed=90325882, prompt=2, tokens=1, choices=2, router=1, stream=False),
            Arrive(at=1.0919, seed=830446793, prompt=20, tokens=6),
            Arrive(at=1.1306, seed=828032886, prompt=2, tokens=1, router=1),
        ),
    ),
    "a router stood still, and was asked meanwhile; it charged what it read afterwards, as the next one did": History(
        seed=977108346904,
        routers=1,
        replicas=1,
        ingress=True,
        seats=3,
        events=(
            Arrive(at=1.4928, seed=507140095, prompt=2, tokens=1, router=1),
            Stop(at=1.9345, process="router-0", seconds=8.0),
            Arrive(at=4.9598, seed=416877762, prompt=2, tokens=3, stream=False),
        ),
    ),
    "a router waited to hear whether it was left, stood still in that wait, and charged when it woke": History(
        seed=30002635,
        routers=1,
        replicas=1,
        ingress=True,
        events=(
            Arrive(at=0.3069, seed=46656609, prompt=2, tokens=3, router=1),
            Leap(at=0.3502, process="router-0", seconds=40.0),
            Stop(at=0.6983, process="router-0", seconds=8.0),
        ),
    ),
    "a router's clock leapt, and what it was asked half a second later was charged to nobody": History(
        seed=78759239490,
        routers=1,
        replicas=1,
        ingress=True,
        seats=3,
        events=(
            Arrive(at=0.0162, seed=663941428, prompt=2, tokens=1),
            Leap(at=0.2294, process="router-0", seconds=40.0),
            Arrive(at=0.8232, seed=745886027, prompt=2, tokens=1),
            Stop(at=1.1443, process="router-0", seconds=8.0),
        ),
    ),
    "a router in doubt refused a prompt and died before that was told: its successor let it in": History(
        seed=900089227,
        routers=2,
        replicas=1,
        ingress=True,
        quota=Quota(requests_per_minute=3, tokens_per_minute=30, max_concurrent=2),
        events=(
            Arrive(at=0.0156, seed=261282677, prompt=2, tokens=1, router=1, stream=False),
            Arrive(at=0.2359, seed=625720358, prompt=2, tokens=1),
            Arrive(at=0.2527, seed=267446669, prompt=2, tokens=1),
            Leap(at=0.6824, process="router-1", seconds=40.0),
            Arrive(at=0.9577, seed=930149331, prompt=60, tokens=1, limited=True),
            Kill(at=1.3178, process="router-1", back=0.5),
        ),
    ),
    "a router had no link yet, for the way was slow, and its clock leapt: 503 before its time was over": History(
        seed=900082724,
        routers=2,
        replicas=1,
        seats=3,
        scaling=(1, 3),
        events=(
            Slow(at=0.4447, router="router-1", replica="replica-0", delay=0.5, seconds=0.6),
            Arrive(at=0.9631, seed=189510284, prompt=2, tokens=1, router=1),
            Leap(at=1.0245, process="router-1", seconds=0.5),
        ),
    ),
    "a way was slow for half a second, and a wait of a minute was foretold by it: 429": History(
        seed=930004413,
        routers=2,
        replicas=1,
        ingress=True,
        seats=3,
        events=(
            Arrive(at=0.0002, seed=535765023, prompt=2, tokens=1, router=1),
            Arrive(at=0.2931, seed=398818156, prompt=60, tokens=3, router=1),
            Arrive(at=0.2967, seed=439446598, prompt=2, tokens=3, choices=2, router=1),
            Arrive(at=0.3212, seed=766800839, prompt=60, tokens=3, router=1),
            Arrive(at=0.3611, seed=91020003, prompt=2, tokens=1),
            Arrive(at=0.4169, seed=658072595, prompt=2, tokens=3),
            Slow(at=0.4862, router="router-1", replica="replica-0", delay=0.5, seconds=0.6),
            Arrive(at=0.5344, seed=995366014, prompt=2, tokens=1),
            Arrive(at=0.5634, seed=212904735, prompt=8, tokens=12, choices=2, router=1, pace=0.3),
            Arrive(at=0.6131, seed=45960326, prompt=8, tokens=6),
            Arrive(at=0.6632, seed=322098193, prompt=60, tokens=1, stream=False, pace=0.05, leaves=0.9252),
            Arrive(at=0.725, seed=971348864, prompt=8, tokens=12, pace=0.3),
            Arrive(at=0.8248, seed=496371931, prompt=60, tokens=3, choices=2),
            Arrive(at=0.9328, seed=49707836, prompt=2, tokens=1, seeded=False, chat=True),
            Arrive(at=0.9772, seed=315404819, prompt=2, tokens=6),
        ),
    ),
    "two replicas came back one by one, and each time another request was next in line": History(
        seed=930059740,
        routers=2,
        replicas=3,
        ingress=True,
        seats=3,
        scaling=(0, 3),
        events=(
            Kill(at=0.8388, process="replica-2", back=1.0),
            Kill(at=1.1475, process="replica-1", back=3.0),
            Arrive(at=1.2595, seed=515340773, prompt=2, tokens=24, choices=2),
            Arrive(at=1.2635, seed=212017170, prompt=2, tokens=1),
            Arrive(at=1.4187, seed=388956872, prompt=2, tokens=12, stream=False),
            Arrive(at=1.4222, seed=202884523, prompt=2, tokens=1),
            Arrive(at=1.4866, seed=1004530852, prompt=2, tokens=6),
            Arrive(at=1.5215, seed=625801839, prompt=2, tokens=12, router=1, chat=True),
            Arrive(at=1.5636, seed=244705435, prompt=8, tokens=12, router=1, pace=0.3),
            Arrive(at=1.6888, seed=632915355, prompt=2, tokens=3, choices=2, chat=True),
            Arrive(at=1.7051, seed=769934448, prompt=8, tokens=3, pace=0.05, timeout=4.0),
            Arrive(at=1.7655, seed=1024445603, prompt=20, tokens=1),
            Arrive(at=1.8745, seed=173816635, prompt=8, tokens=6, stream=False),
            Arrive(at=1.9553, seed=1037266279, prompt=2, tokens=24, choices=2, router=1),
            Arrive(at=1.9906, seed=170269317, prompt=20, tokens=12, router=1, pace=0.3),
            Arrive(at=2.0475, seed=689991984, prompt=8, tokens=6, pace=0.05, timeout=4.0, seeded=False, chat=True),
            Arrive(at=2.0559, seed=42465371, prompt=20, tokens=12, pace=0.3),
            Arrive(at=2.1049, seed=715803676, prompt=60, tokens=24, timeout=1.0),
            Arrive(at=2.1202, seed=644872641, prompt=20, tokens=12, seeded=False),
            Arrive(at=2.1803, seed=259413630, prompt=2, tokens=12, router=1),
            Arrive(at=2.203, seed=587097041, prompt=2, tokens=1, router=1),
        ),
    ),
    "a router that stood still had a successor, and took back later what it had charged": History(
        seed=891132037449,
        routers=2,
        replicas=1,
        ingress=True,
        events=(
            Arrive(at=0.1036, seed=803564224, prompt=2, tokens=1, router=1),
            Arrive(at=0.5907, seed=356554145, prompt=2, tokens=12, stream=False),
            Stop(at=0.8044, process="router-1", seconds=8.0),
            LetGo(at=2.3464, process="router-1"),
        ),
    ),
}
