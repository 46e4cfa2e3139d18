"""Makes Python look as on macOS, to zero2all: in this process and in all that it starts (it is on PYTHONPATH).

Functions that only Linux has are removed at once, because every library has to cope with that. ``sys.platform`` changes
when zero2all is imported, after the libraries that load files for the system they believe to be on.
"""

from __future__ import annotations

import importlib
import mmap
import multiprocessing
import os
import select
import signal
import sys
import sysconfig
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

LINUX_ONLY: dict[ModuleType, tuple[str, ...]] = {
    mmap: ("MAP_POPULATE", "MAP_STACK", "MADV_DONTFORK"),
    os: (
        *("O_DIRECT", "O_PATH", "O_TMPFILE", "copy_file_range", "eventfd", "getrandom", "getxattr", "listxattr"),
        *("memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate", "removexattr", "sched_getaffinity"),
        *("sched_setaffinity", "sched_setscheduler", "setxattr", "splice"),
    ),
    select: ("epoll",),
    signal: ("SIGRTMIN", "SIGRTMAX", "pidfd_send_signal", "sigtimedwait"),
    time: ("CLOCK_BOOTTIME", "CLOCK_TAI"),
}
# Loaded before the change. The variable names more of them than most commands need.
LIBRARIES = ("urllib.request", "numpy", "pyarrow.parquet", "typer", *os.environ.get("TEST_LIBRARIES", "").split())


class OnFirstImport:
    """A finder that finds nothing, but is asked first."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "zero2all" and self in sys.meta_path:
            sys.meta_path.remove(self)
            for library in LIBRARIES:
                importlib.import_module(library)
            sysconfig.get_config_vars()  # kept once they are read, from a file that is named after the system
            sys.platform = "darwin"
        return None


for module, names in LINUX_ONLY.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
for name in ("SC_AVPHYS_PAGES",):
    os.sysconf_names.pop(name, None)
multiprocessing.set_start_method("spawn")
sys.meta_path.insert(0, OnFirstImport())
