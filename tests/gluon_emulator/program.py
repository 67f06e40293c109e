"""One program: its partitions, each a thread of which one runs at a time, until it must wait for a barrier."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .clocks import Access, Clock, join
from .errors import DeadlockError, KernelError, kernel_line, require


class Barrier:
    """An mbarrier: a phase is over when all have arrived and all bytes that were announced have come."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count
        self.missing, self.bytes, self.phases = count, 0, 0
        self.gathered: Clock = {}
        self.known: Clock = {}  # to those who wait: what was before the arrivals of the phases that are over

    def arrive(self, count: int, clock: Clock) -> None:
        require(count <= self.missing, f"{count} arrive at {self}, which waits for {self.missing}")
        self.missing -= count
        join(self.gathered, clock)
        self._settle()

    def copied(self, count: int) -> None:
        self.bytes -= count
        self.gathered[self.copies] = self.phases + 1
        self._settle()

    def open_for(self, parity: int) -> bool:
        """Whether the phase of that parity is over: the present one is of the other."""
        return self.phases & 1 != parity

    @property
    def copies(self) -> str:
        """What its bulk copies are called in clocks."""
        return f"copies to {self.name}"

    def _settle(self) -> None:
        if self.missing:
            return
        require(self.bytes >= 0, f"{-self.bytes} bytes more than announced came to {self}")
        if self.bytes == 0:
            join(self.known, self.gathered)
            self.missing, self.phases, self.gathered = self.count, self.phases + 1, {}

    def __str__(self) -> str:
        arrivals = f"{self.missing} of {self.count} arrivals" + (f" and {self.bytes} bytes" if self.bytes else "")
        return f"{self.name} (in phase {self.phases}: {arrivals} missing)"


NUMBERS = itertools.count(1)  # of partitions, over all programs


class Stopped(BaseException):
    """Ends a thread whose program has failed."""


class Partition:
    """Warps that run one function."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self.clock = name, clock
        self.number = next(NUMBERS)
        self.unfenced: list[Access] = []
        self.products: list[Any] = []
        self.waits: tuple[Barrier, int, str] | None = None
        self.turn = threading.Semaphore(0)
        self.done = self.stopped = False
        self.result: Any = None
        self.error: BaseException | None = None

    def tick(self) -> int:
        """The time of something that happens now."""
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]

    def ready(self) -> bool:
        return not self.done and (self.waits is None or self.waits[0].open_for(self.waits[1]))


class Program:
    """A place of the grid, with shared memory and barriers of its own."""

    def __init__(self, place: tuple[int, int, int], grid: tuple[int, int, int], num_warps: int) -> None:
        self.place, self.grid, self.num_warps = place, grid, num_warps
        self.barriers: dict[Any, Barrier] = {}
        self.running = Partition("the program", {})
        self.together = False  # whether partitions run
        self.back = threading.Semaphore(0)

    def wait(self, barrier: Barrier, parity: int) -> None:
        """Let others run until a phase is over; take over what was before it."""
        own = self.running
        if not barrier.open_for(parity):
            own.waits = (barrier, parity, kernel_line())
            if not self.together:
                raise DeadlockError(describe([own]))
            self.back.release()
            own.turn.acquire()
            if own.stopped:
                raise Stopped
            own.waits = None
        join(own.clock, barrier.known)

    def run(self, functions: Sequence[tuple[Callable, tuple]]) -> Any:
        """Run the functions as partitions; the result of the first."""
        require(not self.together, "warp_specialize within warp_specialize")
        parent = self.running
        partitions = [
            Partition(f"{function.__name__} {number}", dict(parent.clock))
            for number, (function, _) in enumerate(functions)
        ]
        threads = [
            threading.Thread(target=self._partition, args=(partition, *work), daemon=True)
            for partition, work in zip(partitions, functions)
        ]
        self.together = True
        for thread in threads:
            thread.start()
        try:
            self._take_turns(partitions)
        finally:
            for partition in partitions:
                partition.stopped = True
                partition.turn.release()
            for thread in threads:
                thread.join()
            self.together, self.running = False, parent
        for partition in partitions:
            join(parent.clock, partition.clock)
        return partitions[0].result

    def _take_turns(self, partitions: list[Partition]) -> None:
        last = 0
        while not all(partition.done for partition in partitions):
            order = partitions[last + 1 :] + partitions[: last + 1]
            chosen = next((partition for partition in order if partition.ready()), None)
            if chosen is None:
                raise DeadlockError(describe([partition for partition in partitions if not partition.done]))
            last, self.running = partitions.index(chosen), chosen
            chosen.turn.release()
            self.back.acquire()
            if chosen.error is not None:
                raise chosen.error

    def _partition(self, partition: Partition, function: Callable, arguments: tuple) -> None:
        partition.turn.acquire()
        try:
            if not partition.stopped:
                partition.result = function(*arguments)
                require(not partition.products, f"{partition.name} ends with products that it did not wait for")
        except Stopped:
            return
        except BaseException as error:
            partition.error = error
        partition.done = True
        self.back.release()

    def finish(self) -> None:
        """Raise KernelError if copies are under way at the end."""
        for barrier in self.barriers.values():
            if barrier.bytes:
                raise KernelError(f"the program ends while {barrier}")


def describe(partitions: list[Partition]) -> str:
    waits = [f"{p.name} at {p.waits[2]} for parity {p.waits[1]} of {p.waits[0]}" for p in partitions]
    return "all wait: " + "; ".join(waits)


class _Present:
    program: Program | None = None


present = _Present()


def program() -> Program:
    """The program that runs."""
    require(present.program is not None, "no kernel runs")
    return present.program
