"""What lived at the start of a process is not looked at again by its garbage collector; what comes later is."""

import subprocess
import sys

SCRIPT = """
import gc, weakref
from engine.device.machine import settle_heap

class Node:
    pass

def cycle():
    node = Node()
    node.self = node
    return weakref.ref(node)

early = cycle()
kept = [Node() for _ in range(1000)]
settle_heap()
assert early() is None, "garbage is not kept"
assert not any(isinstance(one, Node) for one in gc.get_objects()), "what lives is looked at"
late = cycle()
gc.collect()
assert late() is None, "later garbage is collected"
print(len(kept))
"""


def test_a_settled_heap_is_left_alone_and_later_garbage_is_not():
    # In a process of its own: the heap of this one must stay as it is.
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1000\n", "")
