"""What is ordered before what: vector clocks over the partitions of a program and its bulk copies."""

from __future__ import annotations

from typing import Any, NamedTuple

from .errors import RaceError, kernel_line


Clock = dict[str, int]  # by partition, or copies to a barrier: what of it is known to have happened
Box = tuple[tuple[int, int], ...]  # from and to along each axis


def join(clock: Clock, other: Clock) -> None:
    """Take over what the other knows."""
    for agent, time in other.items():
        if clock.get(agent, 0) < time:
            clock[agent] = time


class Access:
    """One read or write of a part of shared memory.

    Attributes:
        agent, time: known to have happened where the clock shows `time` for `agent`; None while a product may read.
        fenced: time from which bulk copies and tensor cores see it; None: not yet. 0 for their own accesses.
    """

    def __init__(self, box: Box, writes: bool, agent: Any, time: int | None, fenced: int | None) -> None:
        self.box, self.writes, self.agent, self.time, self.fenced = box, writes, agent, time, fenced
        self.line = kernel_line()

    def __str__(self) -> str:
        kind = "write" if self.writes else "read"
        return f"the {kind} by {self.agent} at {self.line}"


class By(NamedTuple):
    """Who accesses: what it knows, and whether past the caches of ordinary accesses (bulk copies, tensor cores)."""

    clock: Clock
    asynchronous: bool


def check(name: str, earlier: list[Access], access: Access, by: By) -> None:
    """Raise RaceError if an earlier access that conflicts is not known to have happened."""
    for other in earlier:
        if not (other.writes or access.writes) or not overlap(other.box, access.box):
            continue
        if other.time is None:
            raise RaceError(f"{access} of {name}{list(access.box)} while a product may still take {other}")
        if by.clock.get(other.agent, 0) < other.time:
            raise RaceError(f"{access} of {name}{list(access.box)} is not ordered after {other}")
        if by.asynchronous and (other.fenced is None or by.clock.get(other.agent, 0) < other.fenced):
            raise RaceError(f"{access} of {name}{list(access.box)}: no fence_async_shared behind {other}")


def remember(earlier: list[Access], access: Access) -> None:
    """Add an access in place of those that it makes needless."""
    earlier[:] = [other for other in earlier if not _needless(other, access)]
    earlier.append(access)


def _needless(other: Access, access: Access) -> bool:
    if not inside(other.box, access.box) or other.time is None:
        return False
    if access.writes:
        return True
    return not other.writes and other.agent == access.agent and (other.fenced == 0) == (access.fenced == 0)


def overlap(one: Box, other: Box) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other))


def inside(one: Box, other: Box) -> bool:
    return all(c <= a and b <= d for (a, b), (c, d) in zip(one, other))
