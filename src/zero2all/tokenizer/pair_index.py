"""JIT kernels: the adjacent pairs of symbols in counted words, the count of each, and the words that contain it.

Most pairs are rare and never merged, so only those that occur at least ``floor`` times are indexed; when none of them
is left, the words are scanned again with a lower floor. Everything is a flat array, so that memory is known: words are
rows of ``symbols`` that shrink in place; pairs are a hash table; the words of a pair are a linked list of nodes; the
pairs that wait to be merged are a heap.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zero2all.tokenizer.jit import jit, jit_inline, prefetch

EMPTY_KEY = -1
NO_NODE = -1
NUM_PAIRS, NUM_NODES, FREE_HEAD, NUM_FREE, HEAP_SIZE = range(5)  # indices into ``sizes``
WORD_START, WORD_LENGTH, WORD_COUNT = range(3)  # columns of ``Words.rows``
NODE_WORD, NODE_NEXT = range(2)  # columns of nodes: a list of words is a chain of them
PAIR_KEY, PAIR_COUNT, PAIR_LIST = range(3)  # columns of pairs, adjacent for the same reason as those of words
LEFT, RIGHT = range(2)  # the side on which a merged pair has a neighbour
GAINED, LOST, LIST_HEAD, LIST_TAIL, LIST_SIZE = range(5)  # columns of ``MergeChanges.cells``
PREFETCH_SYMBOLS, PREFETCH_ROWS = 20, 40  # prefetch distance, in words of a list

Nodes = NDArray[np.int32]
Pairs = NDArray[np.int64]
"""PAIR_LIST is the number of occurrences of a pair while the index is built, then its list. After that lists are in
the heap."""


class Words(NamedTuple):
    symbols: NDArray[np.uint16] | NDArray[np.int32]
    rows: NDArray[np.int64]
    """WORD_START, WORD_LENGTH and WORD_COUNT; adjacent, because they are needed together and memory is slow."""


class PairHeap(NamedTuple):
    counts: NDArray[np.int64]
    lefts: NDArray[np.int32]
    rights: NDArray[np.int32]
    lists: NDArray[np.int32]


class MergeChanges(NamedTuple):
    """How one merge changes the pairs around it, by side and neighbour x: GAINED of the pair (x, new), with the
    LIST_HEAD of its words, LIST_TAIL and LIST_SIZE, and LOST of (x, left)."""

    cells: NDArray[np.int64]
    ids: NDArray[np.int32]
    """The neighbours with a change, and how many in ``sizes``: by GAINED or LOST, and side."""
    sizes: NDArray[np.int64]


def new_pairs(slots: int) -> Pairs:
    pairs = np.zeros((slots, 3), np.int64)
    pairs[:, PAIR_KEY] = EMPTY_KEY
    return pairs


def new_changes(vocab_size: int) -> MergeChanges:
    cells = np.zeros((2, vocab_size, 5), np.int64)
    cells[:, :, LIST_HEAD] = NO_NODE
    return MergeChanges(cells, np.empty((2, 2, vocab_size), np.int32), np.zeros((2, 2), np.int64))


@jit_inline
def pair_key(left: int, right: int) -> int:
    return int(np.int64(left) << 32 | np.int64(right))


@jit_inline
def hash_bucket(key: int, num_buckets: int) -> np.int64:
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed ^ mixed >> np.uint64(29)) & np.uint64(num_buckets - 1))


@jit_inline
def find_slot(pairs: Pairs, key: int) -> int:
    """The slot of a pair, or the empty slot where it belongs."""
    slot = hash_bucket(key, len(pairs))
    while pairs[slot, PAIR_KEY] != key and pairs[slot, PAIR_KEY] != EMPTY_KEY:
        slot = (slot + 1) & (len(pairs) - 1)
    return int(slot)


@jit_inline
def insert_slot(pairs: Pairs, sizes: NDArray[np.int64], key: int) -> int:
    """The slot of a pair, which is inserted if it is new."""
    slot = find_slot(pairs, key)
    if pairs[slot, PAIR_KEY] == EMPTY_KEY:
        pairs[slot, PAIR_KEY] = key
        sizes[NUM_PAIRS] += 1
    return slot


@jit
def copy_pairs(old: Pairs, new: Pairs, sizes: NDArray[np.int64], floor: int) -> None:
    sizes[NUM_PAIRS] = 0
    for slot in range(len(old)):
        if old[slot, PAIR_KEY] != EMPTY_KEY and old[slot, PAIR_COUNT] >= floor:
            there = insert_slot(new, sizes, old[slot, PAIR_KEY])
            new[there, PAIR_COUNT] = old[slot, PAIR_COUNT]
            new[there, PAIR_LIST] = old[slot, PAIR_LIST]


@jit
def sum_by_bucket(words: Words, sums: NDArray[np.int64]) -> None:
    """The sum of its bucket is an upper bound of a pair's count."""
    for word in range(len(words.rows)):
        start = words.rows[word, WORD_START]
        for pos in range(start, start + words.rows[word, WORD_LENGTH] - 1):
            sums[hash_bucket(pair_key(words.symbols[pos], words.symbols[pos + 1]), sums.size)] += words.rows[
                word, WORD_COUNT
            ]


@jit
def count_pairs(
    words: Words, pairs: Pairs, sizes: NDArray[np.int64], sums: NDArray[np.int64], floor: int, word: int
) -> int:
    """Count the pairs that may reach the floor, from ``word`` on; returns the word at which the table became full."""
    while word < len(words.rows):
        start, length = words.rows[word, WORD_START], words.rows[word, WORD_LENGTH]
        if (sizes[NUM_PAIRS] + length) * 4 > len(pairs) * 3:
            break
        for pos in range(start, start + length - 1):
            key = pair_key(words.symbols[pos], words.symbols[pos + 1])
            if sums[hash_bucket(key, sums.size)] >= floor:
                slot = insert_slot(pairs, sizes, key)
                pairs[slot, PAIR_COUNT] += words.rows[word, WORD_COUNT]
                pairs[slot, PAIR_LIST] += 1
        word += 1
    return word


@jit_inline
def allocate_node(nodes: Nodes, sizes: NDArray[np.int64], word: int, after: int) -> int:
    node = sizes[FREE_HEAD]
    if node != NO_NODE:
        sizes[FREE_HEAD] = nodes[node, NODE_NEXT]
        sizes[NUM_FREE] -= 1
        prefetch(nodes, sizes[FREE_HEAD] * 2)
    else:
        node = sizes[NUM_NODES]
        sizes[NUM_NODES] += 1
    nodes[node, NODE_WORD] = word
    nodes[node, NODE_NEXT] = after
    return int(node)


@jit_inline
def free_node(nodes: Nodes, sizes: NDArray[np.int64], node: int) -> int:
    """Free a node; returns the next one."""
    after = int(nodes[node, NODE_NEXT])
    nodes[node, NODE_NEXT] = sizes[FREE_HEAD]
    sizes[FREE_HEAD] = node
    sizes[NUM_FREE] += 1
    return after


@jit
def free_list(nodes: Nodes, sizes: NDArray[np.int64], node: int) -> None:
    while node != NO_NODE:
        node = free_node(nodes, sizes, node)


@jit
def build_word_lists(words: Words, pairs: Pairs, nodes: Nodes, sizes: NDArray[np.int64]) -> None:
    """Add each word to the lists of its pairs; the caller ensures capacity."""
    pairs[:, PAIR_LIST] = NO_NODE
    for word in range(len(words.rows)):
        start = words.rows[word, WORD_START]
        for pos in range(start, start + words.rows[word, WORD_LENGTH] - 1):
            key = pair_key(words.symbols[pos], words.symbols[pos + 1])
            slot = find_slot(pairs, key)
            if pairs[slot, PAIR_KEY] == key:
                first = pairs[slot, PAIR_LIST]
                if first == NO_NODE or nodes[first, NODE_WORD] != word:
                    pairs[slot, PAIR_LIST] = allocate_node(nodes, sizes, word, first)


@jit_inline
def precedes(heap: PairHeap, i: int, j: int) -> bool:
    """Most frequent first; ties go to the pair of the older tokens, as in the Hugging Face trainer."""
    if heap.counts[i] != heap.counts[j]:
        return bool(heap.counts[i] > heap.counts[j])
    if heap.lefts[i] != heap.lefts[j]:
        return bool(heap.lefts[i] < heap.lefts[j])
    return bool(heap.rights[i] < heap.rights[j])


@jit_inline
def heap_swap(heap: PairHeap, i: int, j: int) -> None:
    heap.counts[i], heap.counts[j] = heap.counts[j], heap.counts[i]
    heap.lefts[i], heap.lefts[j] = heap.lefts[j], heap.lefts[i]
    heap.rights[i], heap.rights[j] = heap.rights[j], heap.rights[i]
    heap.lists[i], heap.lists[j] = heap.lists[j], heap.lists[i]


@jit
def sift_down(heap: PairHeap, sizes: NDArray[np.int64], i: int) -> None:
    while True:
        best = i
        for child in range(4 * i + 1, min(4 * i + 5, sizes[HEAP_SIZE])):
            if precedes(heap, child, best):
                best = child
        if best == i:
            return
        heap_swap(heap, i, best)
        i = best


@jit
def heap_push(heap: PairHeap, sizes: NDArray[np.int64], count: int, key: int, list_: int) -> None:
    i = sizes[HEAP_SIZE]
    heap.counts[i] = count
    heap.lefts[i] = np.int32(key >> 32)
    heap.rights[i] = np.int32(key & 0xFFFFFFFF)
    heap.lists[i] = list_
    sizes[HEAP_SIZE] += 1
    while i > 0 and precedes(heap, i, (i - 1) // 4):
        heap_swap(heap, i, (i - 1) // 4)
        i = (i - 1) // 4


@jit
def heap_push_all(pairs: Pairs, heap: PairHeap, sizes: NDArray[np.int64]) -> None:
    for slot in range(len(pairs)):
        if pairs[slot, PAIR_KEY] != EMPTY_KEY:
            heap_push(heap, sizes, pairs[slot, PAIR_COUNT], pairs[slot, PAIR_KEY], pairs[slot, PAIR_LIST])
            pairs[slot, PAIR_LIST] = NO_NODE


@jit
def pop_most_frequent(
    pairs: Pairs, nodes: Nodes, heap: PairHeap, sizes: NDArray[np.int64], floor: int
) -> tuple[int, int, int, int]:
    """The pair to merge next: count (0: none is left above the floor), left, right, list of words.

    Counts in the heap may be stale; such an entry is pushed back with its current count.
    """
    while sizes[HEAP_SIZE] > 0:
        left, right, node = heap.lefts[0], heap.rights[0], heap.lists[0]
        count = pairs[find_slot(pairs, pair_key(left, right)), PAIR_COUNT]
        if count >= floor and heap.counts[0] != count:
            heap.counts[0] = count
            sift_down(heap, sizes, 0)
            continue
        sizes[HEAP_SIZE] -= 1
        heap_swap(heap, 0, sizes[HEAP_SIZE])
        sift_down(heap, sizes, 0)
        if count >= floor:
            return count, left, right, node
        free_list(nodes, sizes, node)
    return 0, 0, 0, NO_NODE


@jit_inline
def record_gain(
    changes: MergeChanges, nodes: Nodes, sizes: NDArray[np.int64], side: int, neighbour: int, word: int, count: int
) -> None:
    cells = changes.cells
    first = cells[side, neighbour, LIST_HEAD]
    if first == NO_NODE:
        changes.ids[GAINED, side, changes.sizes[GAINED, side]] = neighbour
        changes.sizes[GAINED, side] += 1
    if first == NO_NODE or nodes[first, NODE_WORD] != word:
        cells[side, neighbour, LIST_HEAD] = allocate_node(nodes, sizes, word, first)
        cells[side, neighbour, LIST_SIZE] += 1
        if first == NO_NODE:
            cells[side, neighbour, LIST_TAIL] = cells[side, neighbour, LIST_HEAD]
    cells[side, neighbour, GAINED] += count


@jit_inline
def record_loss(changes: MergeChanges, side: int, neighbour: int, count: int) -> None:
    cells = changes.cells
    if cells[side, neighbour, LOST] == 0:
        changes.ids[LOST, side, changes.sizes[LOST, side]] = neighbour
        changes.sizes[LOST, side] += 1
    cells[side, neighbour, LOST] += count


@jit_inline
def prefetch_row(nodes: Nodes, rows: NDArray[np.int64], node: int) -> int:
    if node == NO_NODE:
        return NO_NODE
    prefetch(rows, 3 * nodes[node, NODE_WORD])
    return int(nodes[node, NODE_NEXT])


@jit_inline
def prefetch_symbols(
    nodes: Nodes, rows: NDArray[np.int64], symbols: NDArray[np.uint16] | NDArray[np.int32], node: int
) -> int:
    if node == NO_NODE:
        return NO_NODE
    prefetch(symbols, rows[nodes[node, NODE_WORD], WORD_START])
    return int(nodes[node, NODE_NEXT])


@jit
def merge_pair_in_words(
    words: Words,
    nodes: Nodes,
    sizes: NDArray[np.int64],
    changes: MergeChanges,
    left: int,
    right: int,
    new: int,
    node: int,
) -> int:
    """Merge a pair in the words of its list, from the left; returns the node at which free nodes ran out."""
    symbols, rows = words.symbols, words.rows
    # Each word would cause three cache misses, which dominate training time: its node, its row and its symbols. So two
    # cursors run ahead and prefetch them.
    near, ahead = node, node
    for _ in range(PREFETCH_ROWS):
        ahead = prefetch_row(nodes, rows, ahead)
    for _ in range(PREFETCH_SYMBOLS):
        near = prefetch_symbols(nodes, rows, symbols, near)
    while node != NO_NODE:
        ahead = prefetch_row(nodes, rows, ahead)
        near = prefetch_symbols(nodes, rows, symbols, near)
        word = nodes[node, NODE_WORD]
        start, end = rows[word, WORD_START], rows[word, WORD_START] + rows[word, WORD_LENGTH]
        if len(nodes) - sizes[NUM_NODES] + sizes[NUM_FREE] < 2 * (end - start):
            return node
        count = rows[word, WORD_COUNT]
        read, last = start, end - 1
        while read < last and (symbols[read] != left or symbols[read + 1] != right):
            read += 1
        if read >= last:  # its symbols were merged into other pairs since
            node = free_node(nodes, sizes, node)
            continue
        write = read
        while read < end:
            if symbols[read] != left or read == last or symbols[read + 1] != right:
                symbols[write] = symbols[read]
                read += 1
            else:
                if write > start:
                    previous = symbols[write - 1]
                    if previous == new and changes.cells[RIGHT, left, LIST_HEAD] != NO_NODE:
                        changes.cells[RIGHT, left, GAINED] -= count  # of "new left", made a moment ago
                    else:
                        record_loss(changes, LEFT, previous, count)
                    record_gain(changes, nodes, sizes, LEFT, previous, word, count)
                if read + 2 < end:
                    following = symbols[read + 2]
                    record_loss(changes, RIGHT, following, count)
                    # "new new" has one place only
                    record_gain(changes, nodes, sizes, LEFT if following == new else RIGHT, following, word, count)
                symbols[write] = new
                read += 2
            write += 1
        rows[word, WORD_LENGTH] = write - start
        node = free_node(nodes, sizes, node)
    return NO_NODE


@jit
def apply_changes(
    pairs: Pairs,
    nodes: Nodes,
    heap: PairHeap,
    sizes: NDArray[np.int64],
    changes: MergeChanges,
    floor: int,
    left: int,
    right: int,
    new: int,
) -> None:
    """Update the index after a merge; the caller ensures the capacity of pairs and heap."""
    for side in range(2):
        for number in range(changes.sizes[LOST, side]):
            other = changes.ids[LOST, side, number]
            slot = find_slot(pairs, pair_key(other, left) if side == LEFT else pair_key(right, other))
            if pairs[slot, PAIR_KEY] != EMPTY_KEY:
                pairs[slot, PAIR_COUNT] -= changes.cells[side, other, LOST]
            changes.cells[side, other, LOST] = 0
    for side in range(2):
        for number in range(changes.sizes[GAINED, side]):
            other = changes.ids[GAINED, side, number]
            cell = changes.cells[side, other]
            key = pair_key(other, new) if side == LEFT else pair_key(new, other)
            slot = find_slot(pairs, key)
            known = pairs[slot, PAIR_COUNT] if pairs[slot, PAIR_KEY] != EMPTY_KEY else 0
            count = known + cell[GAINED]
            if known or count >= floor:
                pairs[insert_slot(pairs, sizes, key), PAIR_COUNT] = count
            if count >= floor:
                heap_push(heap, sizes, count, key, cell[LIST_HEAD])
            else:
                nodes[cell[LIST_TAIL], NODE_NEXT] = sizes[FREE_HEAD]  # the entire list is freed
                sizes[FREE_HEAD] = cell[LIST_HEAD]
                sizes[NUM_FREE] += cell[LIST_SIZE]
            cell[GAINED], cell[LIST_HEAD], cell[LIST_SIZE] = 0, NO_NODE, 0
    changes.sizes.fill(0)


@jit
def has_pair(words: Words, word: int, left: int, right: int) -> bool:
    start = words.rows[word, WORD_START]
    for pos in range(start, start + words.rows[word, WORD_LENGTH] - 1):
        if words.symbols[pos] == left and words.symbols[pos + 1] == right:
            return True
    return False


@jit
def prune_lists(words: Words, nodes: Nodes, heap: PairHeap, sizes: NDArray[np.int64]) -> None:
    """Remove words from the lists of pairs that they no longer contain."""
    for i in range(sizes[HEAP_SIZE]):
        node = heap.lists[i]
        last = NO_NODE
        while node != NO_NODE:
            if has_pair(words, nodes[node, NODE_WORD], heap.lefts[i], heap.rights[i]):
                last, node = node, nodes[node, NODE_NEXT]
            else:
                node = free_node(nodes, sizes, node)
                if last == NO_NODE:
                    heap.lists[i] = node
                else:
                    nodes[last, NODE_NEXT] = node
