"""The worker side of the agent: end with it, dump stacks on request, and record errors."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

from zero2all.device_watch import DEVICE_WATCH
from zero2all.elastic.heartbeat import Heartbeat, StartupPhase
from zero2all.environment import AGENT_DIR_VARIABLE, has_agent
from zero2all.errors import Z2aError
from zero2all.processes import end_with_agent

if TYPE_CHECKING:  # imported when it is needed: pydantic takes time
    from zero2all.elastic.flight_recorder import DeviceState

ABORT_REQUEST = b"abort"
ABORT_TIMEOUT = 2.0  # seconds for NCCL to end its collectives
_kept_open: list[IO[str]] = []  # files that faulthandler writes to later


class PeerLostError(Z2aError):
    """Another rank is gone, and this one cannot go on."""


def setup_worker() -> None:
    """Call first in a process that an agent may have started; without an agent it does nothing."""
    if not has_agent():
        return
    end_with_agent()
    torch_imported = threading.Event()
    _answer_agent(torch_imported.is_set)
    import zero2all.torch_private  # noqa: F401 - every rank needs torch, and its seconds count as imports

    torch_imported.set()
    Heartbeat.from_environment().record_phase(StartupPhase.IMPORTED)


def setup_script() -> None:
    """The same in a process whose program may never import torch."""
    if has_agent():
        _answer_agent(_has_process_group)
        Heartbeat.from_environment().record_phase(StartupPhase.IMPORTED)


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return getattr(distributed, "is_initialized", bool)()  # it may still be importing


def _answer_agent(can_dump: Callable[[], bool]) -> None:
    directory, local_rank = Path(os.environ[AGENT_DIR_VARIABLE]), int(os.environ["LOCAL_RANK"])
    faulthandler.enable()
    stacks = open(stacks_path(directory, local_rank), "w", encoding="utf-8")  # noqa: SIM115
    _kept_open.append(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    dump_request = dump_request_path(directory, local_rank)
    dump_request.unlink(missing_ok=True)
    os.mkfifo(dump_request)
    answer = (dump_request, collectives_path(directory, local_rank), can_dump)
    thread = threading.Thread(target=_serve_requests, args=answer, name="z2a-bell", daemon=True)
    thread.start()
    dump_thread_path(directory, local_rank).write_text(str(thread.native_id), encoding="ascii")


def run_worker(program: Callable[[], int | None]) -> NoReturn:
    """Run the program of a rank and end the process with its exit status, without the interpreter's own shutdown.

    Remaining native threads of torch have been seen to abort a process whose work was done and saved: its
    agent would take a rank that stopped gracefully for one that crashed. Exit handlers of Python still run.
    """
    status = 1
    try:
        status = program() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    if not has_agent():
        sys.exit(status)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def record_exception(error: BaseException) -> None:
    """Write torch's error file, which the agent reads. Call it where the error is handled."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def stacks_path(directory: Path, local_rank: int) -> Path:
    return directory / f"stacks-{local_rank}"


def dump_request_path(directory: Path, local_rank: int) -> Path:
    return directory / f"bell-{local_rank}"


def dump_thread_path(directory: Path, local_rank: int) -> Path:
    """Has the id of the thread that answers these requests."""
    return directory / f"bell-{local_rank}.thread"


def collectives_path(directory: Path, local_rank: int) -> Path:
    return directory / f"collectives-{local_rank}.json"


def _serve_requests(requests: Path, to: Path, can_dump: Callable[[], bool]) -> None:
    """Each time the agent opens the FIFO, do what it writes, or dump torch's flight recorder. The main thread may be
    stuck meanwhile."""
    while True:
        try:
            request = requests.read_bytes()
            if request == ABORT_REQUEST and can_dump():
                exit_if_cut_off()
            partial = to.with_suffix(".new")
            partial.write_bytes(_try_dump() if can_dump() else b"{}")
            partial.replace(to)
        except OSError:
            return  # the agent's directory is gone, and the agent with it


def exit_if_cut_off() -> None:
    """A peer is lost. Gloo raises an error in every rank that waits for it; one that waits for NCCL sleeps on, and
    cannot even handle SIGTERM. So end NCCL's collectives and the process: what they would have computed is lost."""
    from zero2all.torch_private import abort_nccl_groups, has_nccl_groups

    if not has_nccl_groups():
        return
    record_exception(PeerLostError("connection closed: a peer was lost while this rank waited for NCCL"))
    # NCCL may hang while it aborts; the process ends all the same.
    aborting = threading.Thread(target=abort_nccl_groups, name="z2a-abort", daemon=True)
    aborting.start()
    aborting.join(ABORT_TIMEOUT)
    os._exit(1)


def _try_dump() -> bytes:
    try:
        return _flight_recorder()
    except Exception:  # CUDA has failed, or this torch writes another format: the next request is served all the same
        traceback.print_exc()
        return b"{}"


def _flight_recorder() -> bytes:
    from zero2all.elastic.flight_recorder import merge_dumps
    from zero2all.hardware import use_rank_device
    from zero2all.torch_private import dump_flight_recorders, process_group_ranks

    with suppress(RuntimeError):  # a script may use another device than that of its rank
        use_rank_device()  # NCCL's recorder asks its events how far the device is
    main_thread = threading.main_thread().ident or 0
    return merge_dumps(dump_flight_recorders(), process_group_ranks(), main_thread, _device_state())


def _device_state() -> DeviceState:
    from zero2all.elastic.flight_recorder import DeviceState

    try:
        position = DEVICE_WATCH.position()
    except RuntimeError:  # a kernel has failed, which every call of CUDA reports from then on
        position = None
    return DeviceState(position, DEVICE_WATCH.is_host_waiting())
