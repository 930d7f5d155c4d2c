"""What routers and replicas say of answers that replicas keep copies of, so that they outlive the router.

A router says `Keep`, `Fetch`, `Forget` and `Disclaim`; a replica says `Fetched`, `Orphaned`, `Superseded` and
`Followed`; both say `Deleted`.
"""

from __future__ import annotations

from typing import Literal

from cluster.wire.parts import Count, Name, Packed, Seconds


class Keep(Packed, tag=8, frozen=True):
    """Keep a copy of an answer of this router's, or what is new of it (`cluster.responses.record`).

    It replaces what another router said of a lower epoch, or of the same one under a lower name. head: b"" where it
    was said before. born: of its head. first: index of the first of `notes` among all of the answer's. end: b"" while
    it runs. retention: seconds to keep it after its end, or without a router. age: seconds since its end. left:
    seconds to its deadline, None = it has none.
    """

    name: Name
    epoch: Count
    tenant: Name
    head: bytes
    born: Name
    first: Count
    notes: tuple[bytes, ...]
    end: bytes = b""
    retention: Seconds = 0.0
    age: Seconds = 0.0
    left: Seconds | None = None


class Fetch(Packed, tag=9, frozen=True):
    """Tell what is kept of an answer behind its first `known` notes; the answer bears the same ticket.

    tenant: it must be this one's; None = any. wait: seconds to wait for news where there are none. claims: where it
    has no router, it is to be offered to no other one than this, which says `Keep` or `Disclaim`.
    """

    ticket: Count
    name: Name
    tenant: Name | None
    known: Count = 0
    wait: Seconds = 0.0
    claims: bool = False


class Forget(Packed, tag=10, frozen=True):
    """Drop what `owner` said of an answer of a tenant's in this epoch.

    owner: "" = the router that says this; None = whoever, also in earlier epochs, and is told of it. born: of its
    head then, for another answer under the same key may have been begun since.
    """

    name: Name
    tenant: Name
    epoch: Count
    owner: Name | None = ""
    born: Name = ""


class Deletion(Packed, frozen=True):
    """An answer of a tenant's that was deleted. born: of its head. left: seconds for which copies may come back."""

    name: Name
    tenant: Name
    born: Name
    left: Seconds


class Deleted(Packed, tag=23, frozen=True):
    """Drop these answers, make and take in none of them any more, and pass on what you had not heard of yet."""

    deletions: tuple[Deletion, ...]


class Disclaim(Packed, tag=21, frozen=True):
    """This router does not go on with an answer that it claimed: it may be offered to others."""

    name: Name


class Fetched(Packed, tag=18, frozen=True):
    """What is kept of an answer; without a name: nothing is. head: b"" where notes were known before.

    more: there are further notes, which fetch as well. owner: the router that made it, with its link if `owned`.
    age: seconds since its end. rival: another router claims it: the first of the two is to have it. left: as of
    `Keep`.
    """

    ticket: Count
    name: Name = ""
    epoch: Count = 0
    head: bytes = b""
    notes: tuple[bytes, ...] = ()
    end: bytes = b""
    more: bool = False
    owner: Name = ""
    owned: bool = False
    age: Seconds = 0.0
    rival: Literal["", "first", "second"] = ""
    left: Seconds | None = None


class Orphaned(Packed, tag=19, frozen=True):
    """The router that made an answer is lost; this one is to go on with it."""

    name: Name


class Superseded(Packed, tag=20, frozen=True):
    """What this router said of an answer is not kept any more: another one has it, in this epoch.

    full: neither, but there is no room for it here; it may be kept elsewhere.
    """

    name: Name
    epoch: Count
    full: bool = False


class Followed(Packed, tag=22, frozen=True):
    """Another router asks for an answer of this one's: somebody waits for it there."""

    name: Name
