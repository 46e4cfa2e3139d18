"""``z2a launch --rendezvous-only``: the server on a machine of its own, without torch, which takes 200 MB."""

from __future__ import annotations

from pathlib import Path

from zero2all.console import say
from zero2all.elastic.addresses import DEFAULT_PORT, LOOPBACK, default_address
from zero2all.elastic.job_secret import find_secret
from zero2all.elastic.rendezvous_server import RendezvousServer
from zero2all.errors import Z2aError


def serve_rendezvous(port: int = DEFAULT_PORT, listen: str | None = None, secret_file: Path | None = None) -> None:
    """Serve the rendezvous until this process is ended. Without ``listen``, for this machine alone."""
    secret, path = find_secret(secret_file, make=True)
    address = LOOPBACK if listen is None else listen
    try:
        server = RendezvousServer(address, port, secret)
    except OSError as error:
        raise Z2aError(
            f"{address}:{port} cannot be bound ({error.strerror}): is a rendezvous running? Try another --rdzv-listen"
        ) from None
    say(f"nodes meet at {server.endpoint}; Ctrl-C ends it")
    if listen is None:
        say(
            "only this machine reaches it: for other nodes, start it with "
            f"--rdzv-listen {default_address()}:{server.port}"
        )
    where = "the variable Z2A_JOB_SECRET" if path is None else f"{path} (mode 0600)"
    say(f"the job secret is in {where}: every node needs it, in the same place, by --secret-file or Z2A_JOB_SECRET")
    server.serve()
