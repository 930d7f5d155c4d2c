"""Errors of the tensor-parallel layer.

ParallelError
├── RendezvousError      the group could not be formed
├── ShardingError        a size cannot be split over the group (raised before any weight is read)
├── ChannelError         the driver-to-worker channel broke: a peer died or a message was damaged
│   ├── ChannelTimeout   a message or a collective missed its deadline
│   └── ChannelClosed    the driver closed the channel in good order
"""


class ParallelError(Exception):
    """Anything that goes wrong inside a tensor-parallel group."""


class RendezvousError(ParallelError):
    """The group could not be formed at the address that rank 0 chose."""


class ShardingError(ParallelError):
    """A dimension cannot be split over the ranks; the message names it and a size that works."""


class ChannelError(ParallelError):
    """The channel from the driver to its workers broke: the whole group must end."""


class ChannelTimeout(ChannelError):
    """A message or a collective did not finish by its deadline: the whole group must end."""


class ChannelClosed(ChannelError):
    """The driver closed the channel in good order: a worker that waits for its next step can end."""
