"""JIT kernels: the adjacent pairs of tokens in counted words, the count of each pair, and the words that contain it.

``docs/tokenizer.md`` explains the data structures with an example. Most pairs are rare and never merged, so only those
that occur at least ``floor`` times are indexed; when none of them is left, the words are scanned again with a lower
floor. Everything is a flat array, so that memory is known in advance. Columns that are needed together are the fields
of one record, since each cache miss costs more than the work on what it brings. A number that kernels change is an
array of one element.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zero2all.tokenizer.jit import jit, jit_inline, prefetch
from zero2all.tokenizer.pair_heap import PairHeap, heap_push, remove_top, sift_down
from zero2all.tokenizer.word_lists import NO_NODE, WordLists, free_list, free_node, prepend_word

EMPTY = -1  # key of a slot of the hash table without a pair
LEFT, RIGHT = range(2)  # the side of a merged pair on which a neighbour is
PREFETCH_SYMBOLS, PREFETCH_ROWS = 20, 40  # prefetch distance, in words of a list

Symbols = NDArray[np.uint16] | NDArray[np.int32]
Records = NDArray[np.void]

WORD = np.dtype([("start", np.int64), ("length", np.int64), ("count", np.int64)], align=True)
PAIR = np.dtype([("key", np.int64), ("count", np.int64), ("occurrences", np.uint32), ("head", np.int32)], align=True)
CHANGE = np.dtype(
    [("gained", np.int64), ("lost", np.int64), ("head", np.int32), ("tail", np.int32), ("num_words", np.int32)],
    align=True,
)


class Words(NamedTuple):
    """Word w is ``symbols[start : start + length]`` with the fields of ``rows[w]``; merges shorten it in place."""

    symbols: Symbols
    """Token ids."""
    rows: Records
    """A WORD for each word."""


class PairTable(NamedTuple):
    """A hash table with open addressing, at most three quarters full."""

    slots: Records
    """A PAIR in each. ``occurrences`` in distinct words and ``head`` of the list of these words matter only while the
    index is built; then the heap has the lists."""
    size: NDArray[np.int64]


class MergeChanges(NamedTuple):
    """How one merge of (left, right) into ``new`` changes the pairs around it, by side and neighbour x.

    On the LEFT, (x, left) has ``lost`` occurrences and (x, new) has ``gained``; on the RIGHT, (right, x) and (new, x).
    """

    by_neighbour: Records
    """A CHANGE for each side and token; ``head``, ``tail`` and ``num_words`` describe the words of the new pair."""
    losing: NDArray[np.int32]
    """The neighbours with a loss on each side, ``num_losing`` of them."""
    num_losing: NDArray[np.int64]
    gaining: NDArray[np.int32]
    num_gaining: NDArray[np.int64]


def new_words(symbols: Symbols, lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> Words:
    """Words that follow each other in ``symbols``."""
    rows = np.empty(lengths.size, WORD)
    rows["start"] = np.cumsum(lengths) - lengths
    rows["length"], rows["count"] = lengths, counts
    return Words(symbols, rows)


def new_pair_table(num_slots: int) -> PairTable:
    """``num_slots`` is a power of two."""
    slots = np.zeros(num_slots, PAIR)
    slots["key"] = EMPTY
    return PairTable(slots, np.zeros(1, np.int64))


def new_changes(vocab_size: int) -> MergeChanges:
    by_neighbour = np.zeros((2, vocab_size), CHANGE)
    by_neighbour["head"] = NO_NODE
    losing, gaining = np.empty((2, 2, vocab_size), np.int32)
    return MergeChanges(by_neighbour, losing, np.zeros(2, np.int64), gaining, np.zeros(2, np.int64))


@jit_inline
def pair_key(left: int, right: int) -> int:
    return int(np.int64(left) << 32 | np.int64(right))


@jit_inline
def hash_bucket(key: int, num_buckets: int) -> np.int64:
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed ^ mixed >> np.uint64(29)) & np.uint64(num_buckets - 1))


@jit_inline
def find_slot(pairs: PairTable, key: int) -> int:
    """The slot of a pair, or the empty slot where it belongs."""
    slots = pairs.slots
    slot = hash_bucket(key, slots.size)
    while slots[slot].key != key and slots[slot].key != EMPTY:
        slot = (slot + 1) & (slots.size - 1)
    return int(slot)


@jit_inline
def insert_slot(pairs: PairTable, key: int) -> int:
    """The slot of a pair, which is inserted if it is new."""
    slot = find_slot(pairs, key)
    if pairs.slots[slot].key == EMPTY:
        pairs.slots[slot].key = key
        pairs.size[0] += 1
    return slot


@jit
def copy_pairs(old: PairTable, new: PairTable, floor: int) -> None:
    for slot in range(old.slots.size):
        pair = old.slots[slot]
        if pair.key != EMPTY and pair.count >= floor:
            copy = new.slots[insert_slot(new, pair.key)]
            copy.count = pair.count
            copy.occurrences = pair.occurrences
            copy.head = pair.head


@jit
def sum_by_bucket(words: Words, sums: NDArray[np.int64]) -> None:
    """The sum of its bucket is an upper bound of a pair's count."""
    for word in range(words.rows.size):
        row = words.rows[word]
        for pos in range(row.start, row.start + row.length - 1):
            sums[hash_bucket(pair_key(words.symbols[pos], words.symbols[pos + 1]), sums.size)] += row.count


@jit
def count_pairs(words: Words, pairs: PairTable, sums: NDArray[np.int64], floor: int, word: int) -> int:
    """Count the pairs that may reach the floor, from ``word`` on; returns the word at which the table became full."""
    while word < words.rows.size:
        row = words.rows[word]
        if (pairs.size[0] + row.length) * 4 > pairs.slots.size * 3:
            break
        for pos in range(row.start, row.start + row.length - 1):
            key = pair_key(words.symbols[pos], words.symbols[pos + 1])
            if sums[hash_bucket(key, sums.size)] >= floor:
                pair = pairs.slots[insert_slot(pairs, key)]
                pair.count += row.count
                pair.occurrences += 1
        word += 1
    return word


@jit
def build_word_lists(words: Words, pairs: PairTable, lists: WordLists) -> None:
    """Add each word to the lists of its pairs; the caller ensures capacity."""
    for slot in range(pairs.slots.size):
        pairs.slots[slot].head = NO_NODE
    for word in range(words.rows.size):
        row = words.rows[word]
        for pos in range(row.start, row.start + row.length - 1):
            key = pair_key(words.symbols[pos], words.symbols[pos + 1])
            pair = pairs.slots[find_slot(pairs, key)]
            if pair.key == key and (pair.head == NO_NODE or lists.nodes[pair.head].word != word):
                pair.head = prepend_word(lists, word, pair.head)


@jit
def push_all(pairs: PairTable, heap: PairHeap) -> None:
    for slot in range(pairs.slots.size):
        pair = pairs.slots[slot]
        if pair.key != EMPTY:
            heap_push(heap, pair.count, pair.key >> 32, pair.key & 0xFFFFFFFF, pair.head)


@jit
def pop_most_frequent(pairs: PairTable, lists: WordLists, heap: PairHeap, floor: int) -> tuple[int, int, int, int]:
    """The pair to merge next: count (0: none is left above the floor), left, right, head of the list of its words.

    Counts in the heap may be stale; such an entry is pushed back with its current count.
    """
    while heap.size[0] > 0:
        left, right, head = heap.lefts[0], heap.rights[0], heap.heads[0]
        count = pairs.slots[find_slot(pairs, pair_key(left, right))].count
        if count >= floor and heap.counts[0] != count:
            heap.counts[0] = count
            sift_down(heap, 0)
            continue
        remove_top(heap)
        if count >= floor:
            return count, left, right, head
        free_list(lists, head)
    return 0, 0, 0, NO_NODE


@jit_inline
def record_gain(changes: MergeChanges, lists: WordLists, side: int, neighbour: int, word: int, count: int) -> None:
    change = changes.by_neighbour[side, neighbour]
    head = change.head
    if head == NO_NODE:
        changes.gaining[side, changes.num_gaining[side]] = neighbour
        changes.num_gaining[side] += 1
    if head == NO_NODE or lists.nodes[head].word != word:
        change.head = prepend_word(lists, word, head)
        change.num_words += 1
        if head == NO_NODE:
            change.tail = change.head
    change.gained += count


@jit_inline
def record_loss(changes: MergeChanges, side: int, neighbour: int, count: int) -> None:
    change = changes.by_neighbour[side, neighbour]
    if change.lost == 0:
        changes.losing[side, changes.num_losing[side]] = neighbour
        changes.num_losing[side] += 1
    change.lost += count


@jit_inline
def prefetch_row(words: Words, lists: WordLists, node: int) -> int:
    if node == NO_NODE:
        return NO_NODE
    prefetch(words.rows, lists.nodes[node].word)
    return int(lists.nodes[node].next)


@jit_inline
def prefetch_symbols(words: Words, lists: WordLists, node: int) -> int:
    if node == NO_NODE:
        return NO_NODE
    prefetch(words.symbols, words.rows[lists.nodes[node].word].start)
    return int(lists.nodes[node].next)


@jit
def merge_pair_in_words(
    words: Words, lists: WordLists, changes: MergeChanges, left: int, right: int, new: int, node: int
) -> int:
    """Merge a pair in the words of its list, from the left; returns the node at which free nodes ran out."""
    symbols = words.symbols
    # Each word would cause three cache misses, which dominate training time: its node, its row and its symbols. So two
    # cursors run ahead and prefetch them.
    near, ahead = node, node
    for _ in range(PREFETCH_ROWS):
        ahead = prefetch_row(words, lists, ahead)
    for _ in range(PREFETCH_SYMBOLS):
        near = prefetch_symbols(words, lists, near)
    while node != NO_NODE:
        ahead = prefetch_row(words, lists, ahead)
        near = prefetch_symbols(words, lists, near)
        word = lists.nodes[node].word
        row = words.rows[word]
        start, end, count = row.start, row.start + row.length, row.count
        if lists.nodes.size - lists.num_used[0] + lists.num_free[0] < 2 * (end - start):
            return node
        read, last = start, end - 1
        while read < last and (symbols[read] != left or symbols[read + 1] != right):
            read += 1
        if read >= last:  # its symbols were merged into other pairs since
            node = free_node(lists, node)
            continue
        write = read
        while read < end:
            if symbols[read] != left or read == last or symbols[read + 1] != right:
                symbols[write] = symbols[read]
                read += 1
            else:
                if write > start:
                    previous = symbols[write - 1]
                    if previous == new and changes.by_neighbour[RIGHT, left].head != NO_NODE:
                        changes.by_neighbour[RIGHT, left].gained -= count  # of "new left", made a moment ago
                    else:
                        record_loss(changes, LEFT, previous, count)
                    record_gain(changes, lists, LEFT, previous, word, count)
                if read + 2 < end:
                    following = symbols[read + 2]
                    record_loss(changes, RIGHT, following, count)
                    # "new new" has one place only
                    record_gain(changes, lists, LEFT if following == new else RIGHT, following, word, count)
                symbols[write] = new
                read += 2
            write += 1
        row.length = write - start
        node = free_node(lists, node)
    return NO_NODE


@jit
def apply_changes(
    pairs: PairTable,
    lists: WordLists,
    heap: PairHeap,
    changes: MergeChanges,
    floor: int,
    left: int,
    right: int,
    new: int,
) -> None:
    """Update the index after a merge; the caller ensures the capacity of pairs and heap."""
    for side in range(2):
        for number in range(changes.num_losing[side]):
            neighbour = changes.losing[side, number]
            change = changes.by_neighbour[side, neighbour]
            key = pair_key(neighbour, left) if side == LEFT else pair_key(right, neighbour)
            pair = pairs.slots[find_slot(pairs, key)]
            if pair.key != EMPTY:
                pair.count -= change.lost
            change.lost = 0
    for side in range(2):
        for number in range(changes.num_gaining[side]):
            neighbour = changes.gaining[side, number]
            change = changes.by_neighbour[side, neighbour]
            first, second = (neighbour, new) if side == LEFT else (new, neighbour)
            slot = find_slot(pairs, pair_key(first, second))
            known = pairs.slots[slot].count if pairs.slots[slot].key != EMPTY else 0
            count = known + change.gained
            if known or count >= floor:
                pairs.slots[insert_slot(pairs, pair_key(first, second))].count = count
            if count >= floor:
                heap_push(heap, count, first, second, change.head)
            else:
                lists.nodes[change.tail].next = lists.free_head[0]  # the entire list is freed
                lists.free_head[0] = change.head
                lists.num_free[0] += change.num_words
            change.gained = 0
            change.head = NO_NODE
            change.num_words = 0
    changes.num_losing.fill(0)
    changes.num_gaining.fill(0)


@jit
def has_pair(words: Words, word: int, left: int, right: int) -> bool:
    row = words.rows[word]
    for pos in range(row.start, row.start + row.length - 1):
        if words.symbols[pos] == left and words.symbols[pos + 1] == right:
            return True
    return False


@jit
def prune_lists(words: Words, lists: WordLists, heap: PairHeap) -> None:
    """Remove words from the lists of pairs that they no longer contain."""
    for i in range(heap.size[0]):
        node = heap.heads[i]
        last = NO_NODE
        while node != NO_NODE:
            if has_pair(words, lists.nodes[node].word, heap.lefts[i], heap.rights[i]):
                last, node = node, lists.nodes[node].next
            else:
                node = free_node(lists, node)
                if last == NO_NODE:
                    heap.heads[i] = node
                else:
                    lists.nodes[last].next = node
