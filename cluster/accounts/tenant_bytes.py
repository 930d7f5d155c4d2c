"""Bytes of many tenants in one bounded place, so that what one of them leaves there takes no room of another's.

Each has an equal share, of those that have something there. One may take more while there is room. Where there is
none, the room of a tenant's next bytes is made of its own if it is beyond its share, else of others that are.
"""

from __future__ import annotations

from collections.abc import Callable


class TenantBytes:
    """Pure and synchronous. most: bytes of all tenants.

    evict: drops what is best dropped of a tenant's and `give_back`s its bytes, or returns False where nothing may go.
    Where that leaves no room, a tenant within its share gets what it asks for all the same, up to twice `most` in
    all: so much may be taken by tenants of which nothing may go. None counts for more than `most` there, so that one
    who takes more than everything has (`take`) leaves others their room.
    """

    def __init__(self, most: int, evict: Callable[[str], bool] = lambda _: False) -> None:
        self.most = most
        self.num_bytes = 0
        self._evict = evict
        self._of: dict[str, int] = {}  # by tenant, none of them 0

    def reserve(self, tenant: str, size: int) -> bool:
        """Take so much for a tenant, if there is or can be made room."""
        if not self.make_room(tenant, size):
            return False
        self.take(tenant, size)
        return True

    def make_room(self, tenant: str, size: int) -> bool:
        """Return whether so much more may be taken; others' or its own goes for it, where there is no room."""
        while self.num_bytes + size > self.most:
            if not any(map(self._evict, self._payers(tenant, size))):
                counted = sum(min(taken, self.most) for taken in self._of.values())
                has_place = not size or counted + size <= 2 * self.most
                return has_place and not self._is_beyond(tenant, tenant, size)
        return True

    def take(self, tenant: str, size: int) -> None:
        """Take so much, whether there is room or not."""
        self.num_bytes += size
        self._of[tenant] = self._of.get(tenant, 0) + size
        if not self._of[tenant]:
            del self._of[tenant]

    def give_back(self, tenant: str, size: int) -> None:
        """Return what was taken."""
        self.take(tenant, -size)

    def _payers(self, tenant: str, size: int) -> list[str]:
        """Return the tenants beyond their share: the one that asks first, then those that have the most."""
        beyond = [one for one in self._of if self._is_beyond(one, tenant, size)]
        return sorted(beyond, key=lambda one: (one != tenant, -self._of[one]))

    def _is_beyond(self, one: str, asks: str, size: int) -> bool:
        num_tenants = len(self._of) + (asks not in self._of)
        more = size if one == asks else 0
        return (self._of.get(one, 0) + more) * num_tenants > self.most
