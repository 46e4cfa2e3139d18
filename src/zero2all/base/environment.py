"""Environment variables: those that the launcher sets for its workers, and those that torch reads for CUDA."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

AGENT_DIR_VARIABLE = "Z2A_AGENT_DIR"  # where the agent of this node looks for heartbeats and stack dumps
STORE_VARIABLE = "Z2A_STORE"  # endpoint of the store that the agents share
JOB_SECRET_VARIABLE = "Z2A_JOB_SECRET"
BackendChoice = Literal["auto", "gloo"]
BACKEND_VARIABLE = "Z2A_BACKEND"  # of the ranks' collectives: auto or gloo
ISLAND_VARIABLE = "Z2A_ISLAND"  # the number of the island that a rank belongs to
ISLANDS_ENDPOINT_VARIABLE = "Z2A_ISLANDS_ENDPOINT"  # where all islands meet
ISLANDS_SECRET_VARIABLE = "Z2A_ISLANDS_SECRET"
NOTIFY_VARIABLE = "Z2A_NOTIFY"  # as --notify: a URL with a secret stays out of the list of processes

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
RECORDER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
RECORDER_ENTRIES = "4096"  # collectives of a few steps: with FSDP a layer has three for each micro-batch
TIMING_VARIABLE = "TORCH_NCCL_ENABLE_TIMING"
DUMP_FILE_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"


def cuda_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to an environment, unless the user has set them.

    Sequences of different lengths and gathered weights of different sizes fragment the memory of a GPU; expandable
    segments grow in place of new ones. The flight recorder holds what a hang is explained with.
    """
    settings = {}
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        settings[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    if not any(name in environment for name in RECORDER_VARIABLES):
        settings[RECORDER_VARIABLES[0]] = RECORDER_ENTRIES
    return settings


_own_settings: set[str] = set()


def set_cuda_environment() -> None:
    """Set the variables for this process and its children.

    Call it before torch is imported, or at least before CUDA is used.
    """
    settings = cuda_settings(os.environ)
    _own_settings.update(settings)
    os.environ.update(settings)


def own_allocator_settings() -> set[str]:
    """Variables for torch's allocator that the user has not set: a script may need another one."""
    return _own_settings.intersection(ALLOCATOR_VARIABLES)


def quiet_profiler() -> None:
    """Keep log lines of torch's profiler out of the terminal. Call it before torch is imported."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def set_dump_file(prefix: str) -> None:
    """Where torch writes the flight recorder of each rank if a collective runs into its timeout, as it does if no
    launcher ends a hang before. Its default is the temporary directory, which a container loses."""
    os.environ.setdefault(DUMP_FILE_VARIABLE, prefix)


def record_collective_starts() -> None:
    """Let the ranks that this process starts record when each collective of NCCL begins on the device, unless the user
    has decided. Only then can a rank whose kernel is stuck be told from those that wait for it. It costs an event per
    collective, and by torch's documentation may in rare cases block its watchdog, so it is not the default."""
    os.environ.setdefault(TIMING_VARIABLE, "1")


def collective_backend(device: str) -> str:
    """The backends for main memory and this kind of device: NCCL on GPUs, unless the user wants gloo there too."""
    if device != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:gloo" if os.environ.get(BACKEND_VARIABLE) == "gloo" else "cpu:gloo,cuda:nccl"


def has_agent() -> bool:
    """Whether 'z2a launch' started this process."""
    return AGENT_DIR_VARIABLE in os.environ
