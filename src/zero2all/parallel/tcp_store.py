"""The TCP store through which ranks find each other, bound only to the address that the launcher gives."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from zero2all.torch_private import Store, TCPStore


def tcp_store_from_env(timeout: timedelta) -> Store | None:
    """Of the ranks that ``z2a launch`` started: the first one holds it. None elsewhere: torch knows what torchrun set.

    torch binds every interface. What ranks send each other may be pickled, and this store gives them their peers.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "False":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listening = _listening_socket(address, port) if rank == 0 else None
    if listening is None:
        return TCPStore(address, port, world_size, rank == 0, timeout)
    return TCPStore(address, port, world_size, True, timeout, master_listen_fd=listening.detach())


def _listening_socket(address: str, port: int) -> socket.socket | None:
    """None if it is not an address of this machine: behind NAT others reach it by one that it does not have."""
    listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(4096)
    except OSError:
        listening.close()
        return None
    return listening
