"""DCP's ``.metadata`` of a checkpoint, from the index of its chunks: with it any tool of torch reads the checkpoint.

Its millions of Python objects take tens of seconds at a thousand ranks. Then it is made in another process
(``python -m zero2all.checkpoint.dcp_metadata``), so that training keeps the interpreter to itself.
"""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path

from zero2all.checkpoint.chunk_index import ChunkIndex
from zero2all.errors import Z2aError
from zero2all.processes import end_with_parent

MAX_CHUNKS_IN_PROCESS = 20_000  # a fraction of a second
NICENESS = 10


def write_dcp_metadata(index: ChunkIndex, target: Path) -> None:
    """Write and sync ``.metadata``."""
    if len(index) <= MAX_CHUNKS_IN_PROCESS:
        _write(index, target)
        return
    command = [sys.executable, "-m", "zero2all.checkpoint.dcp_metadata", str(target)]
    done = subprocess.run(command, input=index.to_bytes(), capture_output=True)
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise Z2aError(f"{target} cannot be written: {reason or f'the process ended with code {done.returncode}'}")


def _write(index: ChunkIndex, target: Path) -> None:
    with open(target, "wb") as stream:
        pickle.dump(index.metadata(), stream)
        stream.flush()
        os.fsync(stream.fileno())


def main() -> None:
    end_with_parent()
    os.nice(NICENESS)
    gc.disable()  # millions of objects, none of them in a cycle
    failed = False
    try:
        _write(ChunkIndex.from_bytes(sys.stdin.buffer.read()), Path(sys.argv[1]))
    except Exception as error:
        sys.stderr.write(f"{error}\n")
        failed = True
    # The file is written and synced. Threads of torch's libraries sometimes abort the interpreter's own exit.
    os._exit(failed)


if __name__ == "__main__":
    main()
