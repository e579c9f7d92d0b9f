"""How often somebody may be wrong before they have to wait. Standard library only; counted in this process, so a restart forgets."""

from __future__ import annotations

import ipaddress
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

LONGEST_WAIT = 3600.0
FORGOTTEN_AFTER = 3600.0
"""Seconds after the last wait until failures no longer count."""
REMEMBERED = 10_000
"""Names or addresses; beyond, the one that was quiet for longest is forgotten, so that memory stays bounded."""

PORT = re.compile(r"^\[([^\]]+)\](?::\d+)?$|^([^:]+):\d+$")
"""Of an address that some proxies give with the client's port, which is another one for each connection."""


def who_counts(host: str) -> str:
    """The key of an address. An IPv6 address counts by its network, as whoever has one has 2^64; an IPv4 address inside one by itself."""
    given = PORT.match(host)
    bare = (given[1] or given[2]) if given else host
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return bare    # a name that a proxy gave
    if not isinstance(address, ipaddress.IPv6Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((int(address), 64), strict=False))


@dataclass
class Failures:
    count: int = 0
    wait_until: float = 0.0


class Lockout:
    """Failures by key (a name, an address). From the `after`th on there is a wait, and each further failure doubles it.

    What is attempted during a wait is to be refused unchecked and does not lengthen the wait: who is patient gets in.
    """

    def __init__(self, *, after: int, first_wait: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.after, self.first_wait, self.clock = after, first_wait, clock
        self.failures: OrderedDict[Hashable, Failures] = OrderedDict()

    def seconds_left(self, key: Hashable) -> float:
        """0: go on."""
        known = self.failures.get(key)
        return 0.0 if known is None else max(0.0, known.wait_until - self.clock())

    def failed(self, key: Hashable) -> None:
        now = self.clock()
        known = self.failures.pop(key, None)
        if known is None or known.wait_until + FORGOTTEN_AFTER < now:
            known = Failures(wait_until=now)
        known.count += 1
        if known.count >= self.after:
            doublings = min(known.count - self.after, 32)
            known.wait_until = now + min(LONGEST_WAIT, self.first_wait * 2 ** doublings)
        else:
            known.wait_until = now
        self.failures[key] = known    # at the end: the most recent
        if len(self.failures) > REMEMBERED:
            self.failures.popitem(last=False)

    def succeeded(self, key: Hashable) -> None:
        self.failures.pop(key, None)
