"""Sharing work out: the largest piece first, each to whoever has the least so far."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def largest_first(costs: Sequence[int], workers: int) -> tuple[int, ...]:
    """Returns the worker, from 0, of each piece of work.

    Among equal costs the earlier piece goes first, among equal loads the lowest worker gets it, so
    the result depends on the arguments' values only. The largest load is at most the mean plus one
    piece.

    Raises:
        ValueError: fewer than one worker.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; legal: >= 1")
    loads = [(0, worker) for worker in range(workers)]  # sorted, hence already a heap
    chosen = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, chosen[index] = loads[0]
        heapq.heapreplace(loads, (load + costs[index], chosen[index]))
    return tuple(chosen)
