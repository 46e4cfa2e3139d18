"""JIT kernels: lists of the words that contain a pair."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zero2all.tokenizer.jit import jit, jit_inline, prefetch

NO_NODE = -1  # end of a list
NODE = np.dtype([("word", np.int32), ("next", np.int32)], align=True)


class WordLists(NamedTuple):
    """Linked lists of words in a common pool of nodes. Nodes that were freed are a list too."""

    nodes: NDArray[np.void]
    """The pool: a NODE in each element."""
    num_used: NDArray[np.int64]
    """Nodes from here on have never been used."""
    num_free: NDArray[np.int64]
    free_head: NDArray[np.int64]


def new_word_lists(capacity: int) -> WordLists:
    return WordLists(np.empty(capacity, NODE), np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, NO_NODE))


def grow_word_lists(lists: WordLists, capacity: int) -> WordLists:
    return lists._replace(nodes=np.resize(lists.nodes, capacity))


def clear_word_lists(lists: WordLists) -> None:
    lists.num_used[0] = lists.num_free[0] = 0
    lists.free_head[0] = NO_NODE


@jit_inline
def prepend_word(lists: WordLists, word: int, head: int) -> int:
    """Prepend a word to a list; returns the new head. The caller ensures capacity."""
    node = lists.free_head[0]
    if node != NO_NODE:
        lists.free_head[0] = lists.nodes[node].next
        lists.num_free[0] -= 1
        prefetch(lists.nodes, lists.free_head[0])
    else:
        node = lists.num_used[0]
        lists.num_used[0] += 1
    lists.nodes[node].word = word
    lists.nodes[node].next = head
    return int(node)


@jit_inline
def free_node(lists: WordLists, node: int) -> int:
    """Free a node; returns the next one."""
    after = int(lists.nodes[node].next)
    lists.nodes[node].next = lists.free_head[0]
    lists.free_head[0] = node
    lists.num_free[0] += 1
    return after


@jit
def free_list(lists: WordLists, node: int) -> None:
    while node != NO_NODE:
        node = free_node(lists, node)
