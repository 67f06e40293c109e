"""Times of calls on a GPU with a cold L2 cache, and how fast its memory can be read."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


# Inputs go round over this many times the L2 cache, so that none of a call's is still there when its turn comes.
L2_ROUNDS = 3
WARM_UP = 3
# The device waits this long a replay before a burst: what the host queues meanwhile runs without gaps.
QUEUEING_CYCLES = 60_000
LARGEST_BURST = 64


class Times(NamedTuple):
    """Milliseconds of one call.

    Attributes:
        median, p10, p90: over the replays.
        replays: how many.
    """

    median: float
    p10: float
    p90: float
    replays: int


def input_sets(bytes_of_a_set: int, device: torch.device | str = "cuda") -> int:
    """How many sets of inputs a cold L2 cache needs, the calls taking them in turn."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, -(-L2_ROUNDS * cache // bytes_of_a_set))


def cold_times(calls: Sequence[Callable[[], object]], replays: int = 100) -> Times:
    """Time one call each of `calls`, which do the same on inputs of their own, as replays of CUDA graphs.

    Args:
        calls: as many as `input_sets` says; each launches on the current stream and never waits for the device.
        replays: at least, over all of `calls`.
    """
    graphs = [captured(call) for call in calls]
    found: list[float] = []
    while len(found) < replays:
        for first in range(0, len(graphs), LARGEST_BURST):
            burst = graphs[first : first + LARGEST_BURST]
            if len(graphs) < LARGEST_BURST:
                burst = burst * (min(LARGEST_BURST, max(replays, 1)) // len(graphs) or 1)
            found += _burst(burst)
    tenths = statistics.quantiles(found, n=10) if len(found) > 1 else found * 9
    return Times(statistics.median(found), tenths[0], tenths[-1], len(found))


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call, after some outside it: kernels compile and libraries set up at their first."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def _burst(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
    """Milliseconds of a replay of each."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in graphs]
    torch.cuda.synchronize()
    torch.cuda._sleep(QUEUEING_CYCLES * len(graphs))
    for graph, (start, end) in zip(graphs, events):
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def read_bandwidth(bytes_read: int = 4 << 30, device: torch.device | str = "cuda") -> float:
    """Bytes a second at which a sum over a tensor that is much larger than the L2 cache reads it."""
    numbers = torch.ones(bytes_read // 8, dtype=torch.int64, device=device)
    total = torch.empty((), dtype=torch.int64, device=device)
    times = cold_times([lambda: torch.sum(numbers, dim=0, out=total)], replays=20)
    return numbers.nbytes / (1e-3 * times.median)
