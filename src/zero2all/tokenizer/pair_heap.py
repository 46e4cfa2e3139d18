"""JIT kernels: a heap of pairs of tokens, most frequent first. Each node has four children."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zero2all.tokenizer.jit import jit, jit_inline


class PairHeap(NamedTuple):
    """Entry i is the pair (lefts[i], rights[i]), its count when it was pushed, and the head of the list of its words.

    Four arrays, because most comparisons need nothing but the counts.
    """

    counts: NDArray[np.int64]
    lefts: NDArray[np.int32]
    rights: NDArray[np.int32]
    heads: NDArray[np.int32]
    size: NDArray[np.int64]
    """One element: the number of entries."""


def new_heap(capacity: int) -> PairHeap:
    return PairHeap(
        counts=np.empty(capacity, np.int64),
        lefts=np.empty(capacity, np.int32),
        rights=np.empty(capacity, np.int32),
        heads=np.empty(capacity, np.int32),
        size=np.zeros(1, np.int64),
    )


def grow_heap(heap: PairHeap, capacity: int) -> PairHeap:
    return heap._replace(
        counts=np.resize(heap.counts, capacity),
        lefts=np.resize(heap.lefts, capacity),
        rights=np.resize(heap.rights, capacity),
        heads=np.resize(heap.heads, capacity),
    )


@jit_inline
def precedes(heap: PairHeap, i: int, j: int) -> bool:
    """Most frequent first; ties go to the pair of the older tokens, as in the Hugging Face trainer."""
    if heap.counts[i] != heap.counts[j]:
        return bool(heap.counts[i] > heap.counts[j])
    if heap.lefts[i] != heap.lefts[j]:
        return bool(heap.lefts[i] < heap.lefts[j])
    return bool(heap.rights[i] < heap.rights[j])


@jit_inline
def swap(heap: PairHeap, i: int, j: int) -> None:
    heap.counts[i], heap.counts[j] = heap.counts[j], heap.counts[i]
    heap.lefts[i], heap.lefts[j] = heap.lefts[j], heap.lefts[i]
    heap.rights[i], heap.rights[j] = heap.rights[j], heap.rights[i]
    heap.heads[i], heap.heads[j] = heap.heads[j], heap.heads[i]


@jit
def sift_down(heap: PairHeap, i: int) -> None:
    while True:
        best = i
        for child in range(4 * i + 1, min(4 * i + 5, heap.size[0])):
            if precedes(heap, child, best):
                best = child
        if best == i:
            return
        swap(heap, i, best)
        i = best


@jit
def heap_push(heap: PairHeap, count: int, left: int, right: int, head: int) -> None:
    """The caller ensures capacity."""
    i = heap.size[0]
    heap.counts[i] = count
    heap.lefts[i] = left
    heap.rights[i] = right
    heap.heads[i] = head
    heap.size[0] += 1
    while i > 0 and precedes(heap, i, (i - 1) // 4):
        swap(heap, i, (i - 1) // 4)
        i = (i - 1) // 4


@jit
def remove_top(heap: PairHeap) -> None:
    heap.size[0] -= 1
    swap(heap, 0, heap.size[0])
    sift_down(heap, 0)
