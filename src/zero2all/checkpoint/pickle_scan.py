"""What a pickle would cost to load, found out before it is loaded.

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
LENGTH_BYTES: Final = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def _argument_kinds() -> list[int]:
    """By opcode: how many bytes it has with its argument, or a negative number of pickletools; 0 if it is none."""
    kinds = [0] * 256
    for opcode in pickletools.opcodes:
        size = opcode.arg.n if opcode.arg else 0
        kinds[ord(opcode.code)] = size if size < 0 else 1 + size
    for put in (pickle.BINPUT, pickle.LONG_BINPUT):  # looked at, though their size is fixed
        kinds[put[0]] = 0
    return kinds


KINDS: Final = _argument_kinds()
PUT_BYTES: Final = {pickle.BINPUT[0]: 1, pickle.LONG_BINPUT[0]: 4}
TWO_LINES: Final = (pickle.GLOBAL[0], pickle.INST[0])


def check_numbers(data: bytes) -> None:
    """Raise ValueError if a pickle numbers an object higher than it can have objects."""
    at, end, stop = 0, len(data), pickle.STOP[0]
    while at < end:
        code = data[at]
        size = KINDS[code]
        if size > 0:
            at += size
            if code == stop:
                return
        elif code in PUT_BYTES:
            size = PUT_BYTES[code]
            _check_number(int.from_bytes(data[at + 1 : at + 1 + size], "little"), at)
            at += 1 + size
        elif size in LENGTH_BYTES:
            begin = at + 1 + LENGTH_BYTES[size]
            at = begin + int.from_bytes(data[at + 1 : begin], "little")
        elif size == pickletools.UP_TO_NEWLINE:
            at = _skip_lines(data, at)
        else:
            return  # no opcode: what loads it ends here too
    # It is cut off, which what loads it will say.


def _skip_lines(data: bytes, at: int) -> int:
    begin = at + 1
    for _ in range(2 if data[at] in TWO_LINES else 1):
        line = begin
        begin = data.find(b"\n", line) + 1 or len(data)
    if data[at] == pickle.PUT[0]:
        _check_number(int(data[line:begin]), at)
    return begin


def _check_number(number: int, at: int) -> None:
    if number > at:
        raise ValueError(f"it numbers an object {number}")


def call_with_stack_for(data: bytes, load: Callable[[], T]) -> T:
    """What ``load`` returns or raises, on a stack for every tuple of a pickle."""
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
