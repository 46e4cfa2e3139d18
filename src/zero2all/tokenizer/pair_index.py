"""Compiled: the neighbouring pairs of symbols in counted words, how often each stands there, and in which words.

Most pairs are rare and never merged, so only those that stand there at least ``floor`` times are in the index; when
none of them is left, the words are gone through again with a lower floor. Everything is a flat array, so that memory is
known: words are rows of ``symbols`` that shrink in place; pairs are a hash table; the words of a pair are a linked list
of nodes; the pairs that wait to be merged are a heap.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zero2all.tokenizer.compiled import compiled, inlined, prefetch

EMPTY = -1  # in place of a key
NOTHING = -1  # in place of a node
PAIRS, NODES, FREE, FREED, WAITING = range(5)  # places in ``sizes``
START, LENGTH, COUNT = range(3)  # columns of ``Words.rows``
WORD, NEXT = range(2)  # columns of nodes: a list of words is a chain of them
KEY, TIMES, LISTED = range(3)  # columns of pairs, side by side for the same reason as those of words
LEFT, RIGHT = range(2)  # the side on which a merged pair has a neighbour
GAINED, LOST, LIST, LAST, SIZE = range(5)  # columns of ``Changes.cells``
NEAR, AHEAD = 20, 40  # words of a list: so far ahead the letters of one, and its row, are asked for

Nodes = NDArray[np.int32]
Pairs = NDArray[np.int64]
"""LISTED is, while the index is made, in how many places a pair stands, then its list. After that lists are in the
heap."""


class Words(NamedTuple):
    symbols: NDArray[np.uint16] | NDArray[np.int32]
    rows: NDArray[np.int64]
    """Of each word START, LENGTH and COUNT; side by side, because they are needed together and memory is slow."""


class Heap(NamedTuple):
    counts: NDArray[np.int64]
    lefts: NDArray[np.int32]
    rights: NDArray[np.int32]
    lists: NDArray[np.int32]


class Changes(NamedTuple):
    """What one merge does to the pairs around it, by side and neighbour x: GAINED of the pair (x, new), with the LIST
    of its words, the LAST node of that and its SIZE, and LOST of (x, left)."""

    cells: NDArray[np.int64]
    ids: NDArray[np.int32]
    """The neighbours with a change, and how many in ``sizes``: by GAINED or LOST, and side."""
    sizes: NDArray[np.int64]


def new_pairs(slots: int) -> Pairs:
    pairs = np.zeros((slots, 3), np.int64)
    pairs[:, KEY] = EMPTY
    return pairs


def new_changes(vocabulary: int) -> Changes:
    cells = np.zeros((2, vocabulary, 5), np.int64)
    cells[:, :, LIST] = NOTHING
    return Changes(cells, np.empty((2, 2, vocabulary), np.int32), np.zeros((2, 2), np.int64))


@inlined
def key_of(left: int, right: int) -> int:
    return int(np.int64(left) << 32 | np.int64(right))


@inlined
def place_of(key: int, places: int) -> np.int64:
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed ^ mixed >> np.uint64(29)) & np.uint64(places - 1))


@inlined
def slot_of(pairs: Pairs, key: int) -> int:
    """Where a pair is, or would be."""
    slot = place_of(key, len(pairs))
    while pairs[slot, KEY] != key and pairs[slot, KEY] != EMPTY:
        slot = (slot + 1) & (len(pairs) - 1)
    return int(slot)


@inlined
def slot_for(pairs: Pairs, sizes: NDArray[np.int64], key: int) -> int:
    """Where a pair is, now that it is there."""
    slot = slot_of(pairs, key)
    if pairs[slot, KEY] == EMPTY:
        pairs[slot, KEY] = key
        sizes[PAIRS] += 1
    return slot


@compiled
def copy_pairs(old: Pairs, new: Pairs, sizes: NDArray[np.int64], floor: int) -> None:
    sizes[PAIRS] = 0
    for slot in range(len(old)):
        if old[slot, KEY] != EMPTY and old[slot, TIMES] >= floor:
            there = slot_for(new, sizes, old[slot, KEY])
            new[there, TIMES] = old[slot, TIMES]
            new[there, LISTED] = old[slot, LISTED]


@compiled
def sum_by_place(words: Words, sums: NDArray[np.int64]) -> None:
    """No pair stands there more often than the sum of its place says."""
    for word in range(len(words.rows)):
        start = words.rows[word, START]
        for at in range(start, start + words.rows[word, LENGTH] - 1):
            sums[place_of(key_of(words.symbols[at], words.symbols[at + 1]), sums.size)] += words.rows[word, COUNT]


@compiled
def count_pairs(
    words: Words, pairs: Pairs, sizes: NDArray[np.int64], sums: NDArray[np.int64], floor: int, word: int
) -> int:
    """Count the pairs that may reach the floor, from ``word`` on; gives the word at which the table became full."""
    while word < len(words.rows):
        start, length = words.rows[word, START], words.rows[word, LENGTH]
        if (sizes[PAIRS] + length) * 4 > len(pairs) * 3:
            break
        for at in range(start, start + length - 1):
            key = key_of(words.symbols[at], words.symbols[at + 1])
            if sums[place_of(key, sums.size)] >= floor:
                slot = slot_for(pairs, sizes, key)
                pairs[slot, TIMES] += words.rows[word, COUNT]
                pairs[slot, LISTED] += 1
        word += 1
    return word


@inlined
def take_node(nodes: Nodes, sizes: NDArray[np.int64], word: int, after: int) -> int:
    node = sizes[FREE]
    if node != NOTHING:
        sizes[FREE] = nodes[node, NEXT]
        sizes[FREED] -= 1
        prefetch(nodes, sizes[FREE] * 2)
    else:
        node = sizes[NODES]
        sizes[NODES] += 1
    nodes[node, WORD] = word
    nodes[node, NEXT] = after
    return int(node)


@inlined
def release(nodes: Nodes, sizes: NDArray[np.int64], node: int) -> int:
    """Give a node back; gives the one after it."""
    after = int(nodes[node, NEXT])
    nodes[node, NEXT] = sizes[FREE]
    sizes[FREE] = node
    sizes[FREED] += 1
    return after


@compiled
def release_all(nodes: Nodes, sizes: NDArray[np.int64], node: int) -> None:
    while node != NOTHING:
        node = release(nodes, sizes, node)


@compiled
def list_words(words: Words, pairs: Pairs, nodes: Nodes, sizes: NDArray[np.int64]) -> None:
    """Put each word on the lists of its pairs; the caller has seen to it that there is room."""
    pairs[:, LISTED] = NOTHING
    for word in range(len(words.rows)):
        start = words.rows[word, START]
        for at in range(start, start + words.rows[word, LENGTH] - 1):
            key = key_of(words.symbols[at], words.symbols[at + 1])
            slot = slot_of(pairs, key)
            if pairs[slot, KEY] == key:
                first = pairs[slot, LISTED]
                if first == NOTHING or nodes[first, WORD] != word:
                    pairs[slot, LISTED] = take_node(nodes, sizes, word, first)


@inlined
def before(heap: Heap, i: int, j: int) -> bool:
    """More often first; among equals the pair of the older tokens, as the Hugging Face trainer has it."""
    if heap.counts[i] != heap.counts[j]:
        return bool(heap.counts[i] > heap.counts[j])
    if heap.lefts[i] != heap.lefts[j]:
        return bool(heap.lefts[i] < heap.lefts[j])
    return bool(heap.rights[i] < heap.rights[j])


@inlined
def swap(heap: Heap, i: int, j: int) -> None:
    heap.counts[i], heap.counts[j] = heap.counts[j], heap.counts[i]
    heap.lefts[i], heap.lefts[j] = heap.lefts[j], heap.lefts[i]
    heap.rights[i], heap.rights[j] = heap.rights[j], heap.rights[i]
    heap.lists[i], heap.lists[j] = heap.lists[j], heap.lists[i]


@compiled
def sink(heap: Heap, sizes: NDArray[np.int64], i: int) -> None:
    while True:
        best = i
        for child in range(4 * i + 1, min(4 * i + 5, sizes[WAITING])):
            if before(heap, child, best):
                best = child
        if best == i:
            return
        swap(heap, i, best)
        i = best


@compiled
def push(heap: Heap, sizes: NDArray[np.int64], count: int, key: int, list_: int) -> None:
    i = sizes[WAITING]
    heap.counts[i] = count
    heap.lefts[i] = np.int32(key >> 32)
    heap.rights[i] = np.int32(key & 0xFFFFFFFF)
    heap.lists[i] = list_
    sizes[WAITING] += 1
    while i > 0 and before(heap, i, (i - 1) // 4):
        swap(heap, i, (i - 1) // 4)
        i = (i - 1) // 4


@compiled
def push_all(pairs: Pairs, heap: Heap, sizes: NDArray[np.int64]) -> None:
    for slot in range(len(pairs)):
        if pairs[slot, KEY] != EMPTY:
            push(heap, sizes, pairs[slot, TIMES], pairs[slot, KEY], pairs[slot, LISTED])
            pairs[slot, LISTED] = NOTHING


@compiled
def pop(pairs: Pairs, nodes: Nodes, heap: Heap, sizes: NDArray[np.int64], floor: int) -> tuple[int, int, int, int]:
    """The pair to merge next: count (0: none is left above the floor), left, right, list of words.

    Counts in the heap may be older than those of the pairs; such an entry goes back in with its count of today.
    """
    while sizes[WAITING] > 0:
        left, right, node = heap.lefts[0], heap.rights[0], heap.lists[0]
        count = pairs[slot_of(pairs, key_of(left, right)), TIMES]
        if count >= floor and heap.counts[0] != count:
            heap.counts[0] = count
            sink(heap, sizes, 0)
            continue
        sizes[WAITING] -= 1
        swap(heap, 0, sizes[WAITING])
        sink(heap, sizes, 0)
        if count >= floor:
            return count, left, right, node
        release_all(nodes, sizes, node)
    return 0, 0, 0, NOTHING


@inlined
def gain(
    changes: Changes, nodes: Nodes, sizes: NDArray[np.int64], side: int, neighbour: int, word: int, count: int
) -> None:
    cells = changes.cells
    first = cells[side, neighbour, LIST]
    if first == NOTHING:
        changes.ids[GAINED, side, changes.sizes[GAINED, side]] = neighbour
        changes.sizes[GAINED, side] += 1
    if first == NOTHING or nodes[first, WORD] != word:
        cells[side, neighbour, LIST] = take_node(nodes, sizes, word, first)
        cells[side, neighbour, SIZE] += 1
        if first == NOTHING:
            cells[side, neighbour, LAST] = cells[side, neighbour, LIST]
    cells[side, neighbour, GAINED] += count


@inlined
def lose(changes: Changes, side: int, neighbour: int, count: int) -> None:
    cells = changes.cells
    if cells[side, neighbour, LOST] == 0:
        changes.ids[LOST, side, changes.sizes[LOST, side]] = neighbour
        changes.sizes[LOST, side] += 1
    cells[side, neighbour, LOST] += count


@inlined
def ask_for_row(nodes: Nodes, rows: NDArray[np.int64], node: int) -> int:
    if node == NOTHING:
        return NOTHING
    prefetch(rows, 3 * nodes[node, WORD])
    return int(nodes[node, NEXT])


@inlined
def ask_for_letters(
    nodes: Nodes, rows: NDArray[np.int64], symbols: NDArray[np.uint16] | NDArray[np.int32], node: int
) -> int:
    if node == NOTHING:
        return NOTHING
    prefetch(symbols, rows[nodes[node, WORD], START])
    return int(nodes[node, NEXT])


@compiled
def merge_words(
    words: Words,
    nodes: Nodes,
    sizes: NDArray[np.int64],
    changes: Changes,
    left: int,
    right: int,
    new: int,
    node: int,
) -> int:
    """Merge a pair in the words of its list, from the left; gives the node at which room for nodes ran out."""
    symbols, rows = words.symbols, words.rows
    # A visit to a word would wait for memory three times, which is most of the time of training: for its node, its row
    # and its letters. So two walkers go before, and ask for what will be needed.
    near, ahead = node, node
    for _ in range(AHEAD):
        ahead = ask_for_row(nodes, rows, ahead)
    for _ in range(NEAR):
        near = ask_for_letters(nodes, rows, symbols, near)
    while node != NOTHING:
        ahead = ask_for_row(nodes, rows, ahead)
        near = ask_for_letters(nodes, rows, symbols, near)
        word = nodes[node, WORD]
        start, end = rows[word, START], rows[word, START] + rows[word, LENGTH]
        if len(nodes) - sizes[NODES] + sizes[FREED] < 2 * (end - start):
            return node
        count = rows[word, COUNT]
        read, last = start, end - 1
        while read < last and (symbols[read] != left or symbols[read + 1] != right):
            read += 1
        if read >= last:  # its letters went into other pairs since
            node = release(nodes, sizes, node)
            continue
        write = read
        while read < end:
            if symbols[read] != left or read == last or symbols[read + 1] != right:
                symbols[write] = symbols[read]
                read += 1
            else:
                if write > start:
                    previous = symbols[write - 1]
                    if previous == new and changes.cells[RIGHT, left, LIST] != NOTHING:
                        changes.cells[RIGHT, left, GAINED] -= count  # of "new left", made a moment ago
                    else:
                        lose(changes, LEFT, previous, count)
                    gain(changes, nodes, sizes, LEFT, previous, word, count)
                if read + 2 < end:
                    following = symbols[read + 2]
                    lose(changes, RIGHT, following, count)
                    # "new new" has one place only
                    gain(changes, nodes, sizes, LEFT if following == new else RIGHT, following, word, count)
                symbols[write] = new
                read += 2
            write += 1
        rows[word, LENGTH] = write - start
        node = release(nodes, sizes, node)
    return NOTHING


@compiled
def apply_changes(
    pairs: Pairs,
    nodes: Nodes,
    heap: Heap,
    sizes: NDArray[np.int64],
    changes: Changes,
    floor: int,
    left: int,
    right: int,
    new: int,
) -> None:
    """Bring the index up to date after a merge; the caller has seen to it that pairs and heap have room."""
    for side in range(2):
        for number in range(changes.sizes[LOST, side]):
            other = changes.ids[LOST, side, number]
            slot = slot_of(pairs, key_of(other, left) if side == LEFT else key_of(right, other))
            if pairs[slot, KEY] != EMPTY:
                pairs[slot, TIMES] -= changes.cells[side, other, LOST]
            changes.cells[side, other, LOST] = 0
    for side in range(2):
        for number in range(changes.sizes[GAINED, side]):
            other = changes.ids[GAINED, side, number]
            cell = changes.cells[side, other]
            key = key_of(other, new) if side == LEFT else key_of(new, other)
            slot = slot_of(pairs, key)
            known = pairs[slot, TIMES] if pairs[slot, KEY] != EMPTY else 0
            count = known + cell[GAINED]
            if known or count >= floor:
                pairs[slot_for(pairs, sizes, key), TIMES] = count
            if count >= floor:
                push(heap, sizes, count, key, cell[LIST])
            else:
                nodes[cell[LAST], NEXT] = sizes[FREE]  # the list goes back as a whole
                sizes[FREE] = cell[LIST]
                sizes[FREED] += cell[SIZE]
            cell[GAINED], cell[LIST], cell[SIZE] = 0, NOTHING, 0
    changes.sizes.fill(0)


@compiled
def has_pair(words: Words, word: int, left: int, right: int) -> bool:
    start = words.rows[word, START]
    for at in range(start, start + words.rows[word, LENGTH] - 1):
        if words.symbols[at] == left and words.symbols[at + 1] == right:
            return True
    return False


@compiled
def prune(words: Words, nodes: Nodes, heap: Heap, sizes: NDArray[np.int64]) -> None:
    """Take words off the lists of pairs that they no longer hold."""
    for i in range(sizes[WAITING]):
        node = heap.lists[i]
        last = NOTHING
        while node != NOTHING:
            if has_pair(words, nodes[node, WORD], heap.lefts[i], heap.rights[i]):
                last, node = node, nodes[node, NEXT]
            else:
                node = release(nodes, sizes, node)
                if last == NOTHING:
                    heap.lists[i] = node
                else:
                    nodes[last, NEXT] = node
