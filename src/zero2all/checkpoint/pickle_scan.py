"""The cost of loading a pickle, found out before it is loaded.

Python's unpickler has two weaknesses that restricting names does not cure:

- It keeps a table of the objects that a pickle numbers, and grows it to twice the highest number at once: five bytes
  with the number 2**32 - 1 take 64 GiB. Pickles that were written number them one after another, so no number is above
  the count of bytes before it.
- A tuple is hashed by recursion in C, without a limit: a key of a hundred thousand tuples, each in the next, overflows
  the stack. So a pickle with that many tuples is loaded on a stack that is large enough for all of them.
"""

from __future__ import annotations

import pickle
import pickletools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

T = TypeVar("T")
TUPLES: Final = (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
SAFE_TUPLES: Final = 10_000  # fit into the stack of any thread
STACK_BYTES: Final = 256  # to hash one level, which takes about 100
PAGE_BYTES: Final = 1 << 16
NUMBERING: Final = ("PUT", "BINPUT", "LONG_BINPUT")


def check_numbers(data: bytes) -> None:
    """Raise ValueError if a pickle numbers an object higher than it can have objects, or is cut off."""
    for opcode, argument, at in pickletools.genops(data):
        if opcode.name in NUMBERING and argument is not None and argument > (at or 0):
            raise ValueError(f"it numbers an object {argument}")


def call_with_stack_for(data: bytes, load: Callable[[], T]) -> T:
    """Call ``load`` on a stack with room for every tuple of a pickle."""
    tuples = sum(data.count(code) for code in TUPLES)
    if tuples <= SAFE_TUPLES:
        return load()
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(load())
        except BaseException as error:
            done.set_exception(error)

    before = threading.stack_size((tuples * STACK_BYTES // PAGE_BYTES + 32) * PAGE_BYTES)
    try:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return done.result()
