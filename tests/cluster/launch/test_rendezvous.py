"""The rendezvous over real sockets: nodes that join and leave, and unauthenticated clients."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from tests.adversarial.payload import Payload
from zero2all.base.environment import JOB_SECRET_VARIABLE
from zero2all.base.errors import UsageError
from zero2all.base.network.connection import MAGIC, NAME_BYTES, NONCE_BYTES, SignedSession, TamperedError
from zero2all.base.torch_private import TCPStore
from zero2all.cluster.launch import rendezvous_client as client_module
from zero2all.cluster.launch import rendezvous_server as serve_module
from zero2all.cluster.launch.job_secret import find_secret, new_secret
from zero2all.cluster.launch.notify import JobEvent
from zero2all.cluster.launch.rendezvous import Rendezvous
from zero2all.cluster.launch.rendezvous_client import (
    JobEndedError,
    NodeExcludedError,
    RendezvousClient,
    RendezvousStore,
    WrongSecretError,
)
from zero2all.cluster.launch.rendezvous_host import RendezvousConfig
from zero2all.cluster.launch.rendezvous_messages import (
    Enter,
    JoinNextRound,
    OwnNode,
    Ping,
    RendezvousRequest,
    RendezvousSettings,
    SetValues,
)
from zero2all.cluster.launch.rendezvous_server import RendezvousServer
from zero2all.cluster.launch.restart_policy import FailureFacts
from zero2all.parallel.mesh import tcp_store_from_env

SECRET = "correct horse battery staple"
PATIENCE = 60.0
QUICK = RendezvousSettings((1, 2, 3), settle=0.3, last_call=0.3)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RendezvousServer]:
    monkeypatch.setenv(JOB_SECRET_VARIABLE, SECRET)
    server = RendezvousServer("127.0.0.1", 0, SECRET)
    server.start()
    yield server
    server.stop()


class Cluster:
    def __init__(self, server: RendezvousServer, stack: ExitStack, settings: RendezvousSettings) -> None:
        self.server, self.stack, self.settings = server, stack, settings

    def node(self, number: int, job: str = "job") -> Rendezvous:
        config = RendezvousConfig(self.server.endpoint, advertise=f"10.0.0.{number}", patience=PATIENCE)
        found = Rendezvous(config, self.settings, job, procs=2)
        self.stack.callback(found.shutdown)
        return found

    def meet(self, *nodes: Rendezvous) -> list[int]:
        """All of them join the next round; returns their ranks."""
        with ThreadPoolExecutor(len(nodes)) as pool:
            return [info.rank for info in pool.map(lambda node: node.next_rendezvous(), nodes, timeout=PATIENCE)]


@pytest.fixture
def cluster(server: RendezvousServer) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(server, stack, QUICK)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def listening() -> set[str]:
    """Addresses at which this process listens, in the format of /proc."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(descriptor))
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()
    ]
    return {
        line[1].partition(":")[0] for line in lines[1:] if line[3] == "0A" and f"socket:[{line[9]}]" in inodes
    }  # fmt: skip


def test_one_node_listens_on_loopback_alone() -> None:
    before = listening()
    node = Rendezvous(RendezvousConfig(), RendezvousSettings((1,)), "job", procs=2)
    try:
        info = node.next_rendezvous()
        assert listening() - before <= {"0100007F"}
        assert (info.rank, info.world_size, info.bootstrap_store_info.master_addr) == (0, 1, "127.0.0.1")
    finally:
        node.shutdown()


def test_the_store_of_the_ranks_is_bound_to_its_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.2", 0)) as probe:
        port = probe.getsockname()[1]
    own = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**own, "TORCHELASTIC_USE_AGENT_STORE": "False"}.items():
        monkeypatch.setenv(name, value)
    before = listening()
    store = tcp_store_from_env(timedelta(seconds=PATIENCE))
    store.set("key", "value")
    assert listening() - before <= {"0200007F"}
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert tcp_store_from_env(timedelta(seconds=1)) is None, "torchrun has its own"


def test_the_given_address_alone_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_SECRET_VARIABLE, SECRET)
    before = listening()
    node = Rendezvous(RendezvousConfig("127.0.0.3:0", patience=1.0), RendezvousSettings((1, 2)), "job", procs=1)
    try:
        assert listening() - before <= {"0300007F"}
    finally:
        node.shutdown()


def test_nodes_meet_lose_one_another_and_meet_again(cluster: Cluster) -> None:
    third, first, second = cluster.node(3), cluster.node(1), cluster.node(2)
    assert cluster.meet(third, first, second) == [2, 0, 1]
    assert (third.assignment.first_rank, third.assignment.ranks, third.assignment.master) == (4, 6, "10.0.0.1")
    assert first.num_nodes_waiting() == 0
    second.shutdown()  # as if it was killed: it has not left
    until(lambda: first.seconds_since_peer_loss() is not None and third.seconds_since_peer_loss() is not None)
    assert first.client.status.lost == (f"{socket.gethostname()} (10.0.0.2)",)
    first.failed = third.failed = True
    assert cluster.meet(first, third) == [0, 1]
    assert (first.seconds_since_peer_loss(), first.num_nodes_waiting()) == (None, 0)
    late = cluster.node(2)
    waits = threading.Thread(target=late.next_rendezvous)
    waits.start()
    until(lambda: first.num_nodes_waiting() and third.num_nodes_waiting())
    assert cluster.meet(third, first) == [2, 0]
    waits.join(PATIENCE)
    late.leave()
    until(lambda: first.num_nodes_waiting())
    assert first.seconds_since_peer_loss() is None, "it left gracefully"


def test_a_job_that_has_ended_can_be_started_again(cluster: Cluster) -> None:
    one, other = cluster.node(1), cluster.node(2)
    cluster.meet(one, other)
    one.close("failed")
    until(other.is_closed)
    with pytest.raises(JobEndedError, match="closed by another node"):
        other.num_nodes_waiting()
    with pytest.raises(JobEndedError):
        other.next_rendezvous()
    again = [cluster.node(1), cluster.node(2)]
    assert cluster.meet(*again) == [0, 1]
    again[0].close("done")
    with pytest.raises(JobEndedError, match="done"):
        again[1].next_rendezvous()


def test_a_spare_ends_with_the_job(server: RendezvousServer) -> None:
    with ExitStack() as stack:
        cluster = Cluster(server, stack, replace(QUICK, counts=(1,)))
        works, spare = cluster.node(1), cluster.node(2)
        cluster.meet(works)
        ends: list[bool] = []

        def wait() -> None:
            try:
                spare.next_rendezvous()
            except JobEndedError as end:
                ends.append(end.done)

        thread = threading.Thread(target=wait)
        thread.start()
        works.close("done")
        thread.join(PATIENCE)
        assert ends == [True]


def test_jobs_at_one_endpoint_do_not_mix_and_other_node_counts_are_refused(cluster: Cluster) -> None:
    assert cluster.meet(cluster.node(1, "a")) == [0]
    assert cluster.meet(cluster.node(2, "b")) == [0]
    cluster.settings = RendezvousSettings((5,))
    with pytest.raises(UsageError, match=r"runs on 1:3 nodes, .* asks for 5: give the same --nnodes"):
        cluster.node(3, "a")


def test_a_rendezvous_that_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_SECRET_VARIABLE, SECRET)
    server = RendezvousServer("127.0.0.1", 0, SECRET)
    server.start()
    with ExitStack() as stack:
        cluster = Cluster(server, stack, QUICK)
        node = cluster.node(1)
        cluster.meet(node)
        server.stop()
        with pytest.raises(RendezvousConnectionError):
            until(lambda: node.num_nodes_waiting())
        with pytest.raises(RendezvousConnectionError):
            node.next_rendezvous()
        cluster.server = RendezvousServer("127.0.0.1", server.address.port, SECRET)
        cluster.server.start()
        stack.callback(cluster.server.stop)
        assert cluster.meet(cluster.node(1)) == [0]


def test_clocks_that_are_hours_apart_do_not_matter(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: 3600.0 * (next(jumps) % 48))
    monkeypatch.setattr(client_module, "HEARTBEAT_INTERVAL", 0.05)
    one, other = cluster.node(1), cluster.node(2)
    assert cluster.meet(one, other) == [0, 1]
    beats = one.client._number
    until(lambda: one.client._number > beats + 10)
    assert (one.seconds_since_peer_loss(), other.num_nodes_waiting()) == (None, 0)


def test_a_node_with_another_secret_is_refused_by_name(
    server: RendezvousServer, capsys: pytest.CaptureFixture[str]
) -> None:
    name = socket.gethostname()
    with pytest.raises(WrongSecretError, match=rf"node {name} \(127.0.0.1\) was refused .* wrong job secret: copy"):
        RendezvousClient(server.endpoint, "quite another secret", patience=PATIENCE)
    until(lambda: f"rejected node {name} (127.0.0.1): wrong job secret" in capsys.readouterr().err)


def test_unauthenticated_clients_run_no_code_and_do_not_disturb(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "executed"
    bomb = pickle.dumps(Payload(mark))
    one, other = cluster.node(1), cluster.node(2)
    cluster.meet(one, other)
    name = b"\x1b[2Jevil"
    hellos = [
        b"",
        bomb,
        bytes(NONCE_BYTES) + name.ljust(NAME_BYTES, b"\0") + bytes(32) + bomb,
        b"GET / HTTP/1.0\r\n\r\n" * 10,
        os.urandom(5000),
        b"\xff" * 5000,
    ]
    for hello in hellos:
        with socket.create_connection(("127.0.0.1", cluster.server.address.port)) as stranger, suppress(OSError):
            stranger.sendall(hello)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(PATIENCE)
            while stranger.recv(1 << 16):
                pass
    with pytest.raises(RuntimeError):  # a client of torch's own store
        TCPStore("127.0.0.1", cluster.server.address.port, is_master=False, timeout=timedelta(seconds=2)).set(
            "key", "value"
        )
    assert cluster.meet(one, other) == [0, 1]
    assert not mark.exists()
    said = capsys.readouterr().err
    assert "\x1b[2J" not in said
    assert "Traceback" not in said


def test_an_impostor_of_the_rendezvous_is_not_trusted(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    bomb = pickle.dumps(Payload(mark))
    for answer in (
        bomb * 10,
        MAGIC + bytes(NONCE_BYTES) + b"\1" + bytes(32) + bomb,
        MAGIC + bytes(NONCE_BYTES) + bytes(33),
    ):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def play(server: socket.socket = server, answer: bytes = answer) -> None:
                found, _ = server.accept()
                with found, suppress(OSError):
                    found.sendall(answer)
                    found.recv(1 << 16)

            thread = threading.Thread(target=play)
            thread.start()
            with pytest.raises(UsageError, match=r"something else than|does not know the job secret|wrong job secret"):
                RendezvousClient(f"127.0.0.1:{server.getsockname()[1]}", SECRET, patience=PATIENCE)
            thread.join(PATIENCE)
    assert not mark.exists()


def test_frames_that_are_changed_repeated_or_sent_back_are_refused() -> None:
    secret, nonces = SECRET.encode(), (b"s" * NONCE_BYTES, b"c" * NONCE_BYTES)
    client, server = SignedSession(secret, *nonces, is_server=False), SignedSession(secret, *nonces, is_server=True)
    frame = client.seal({"op": "close"})[4:]
    assert server.open(frame) == {"op": "close"}
    with pytest.raises(TamperedError):
        server.open(frame)  # again
    with pytest.raises(TamperedError):
        client.open(frame)  # back to the sender
    later = client.seal({"op": "beat"})[4:]
    for place in range(len(later)):
        with pytest.raises(TamperedError):
            server.open(later[:place] + bytes([later[place] ^ 1]) + later[place + 1 :])
    with pytest.raises(TamperedError):
        SignedSession(secret, b"t" * NONCE_BYTES, nonces[1], is_server=True).open(later)  # of another connection
    assert server.open(later) == {"op": "beat"}


def test_invalid_requests_are_answered(server: RendezvousServer, capsys: pytest.CaptureFixture[str]) -> None:
    """From an authenticated client, such as a node of another version."""
    client = RendezvousClient(server.endpoint, SECRET, patience=PATIENCE)
    fly, wait = (type(name, (RendezvousRequest,), {}) for name in ("Fly", "JoinNextRound"))
    own: Any = {"address": "10.0.0.1", "pid": 1, "procs": 1}
    wrong: Any = [{"counts": []}, 5]
    for request in (fly(), wait(), Enter("a", wrong[0], own), Enter("a", wrong[1], own), SetValues(wrong)):
        with pytest.raises(UsageError, match="refused"):
            client.request(request)
    client.request(Ping())
    client.close()
    assert "Traceback" not in capsys.readouterr().err


def test_values_travel_between_the_agents_and_the_ranks(cluster: Cluster) -> None:
    node = cluster.node(1)
    cluster.meet(node)
    rank = RendezvousStore.from_environment(cluster.server.endpoint, "job", timedelta(seconds=PATIENCE))
    store = RendezvousStore(node.client, timedelta(seconds=PATIENCE))
    threading.Timer(0.2, store.set, ("late", b"\x00\xffbytes")).start()
    assert rank.get("late") == b"\x00\xffbytes"
    assert [rank.add("count", 2), store.add("count", 3)] == [2, 5]
    assert [rank.check([name]) for name in ("count", "none")] == [True, False]
    with pytest.raises(RuntimeError, match="none is not there after"):
        rank.wait(["none"], timedelta(seconds=0.1))
    assert store.delete_key("count")
    node.failed = True
    cluster.meet(node)
    assert not rank.check(["late"]), "values of the previous round are gone"


def test_hundreds_of_nodes_join(server: RendezvousServer) -> None:
    count = 200
    settings = RendezvousSettings((count,), dead_after=PATIENCE)  # these clients send no heartbeats
    clients = [RendezvousClient(server.endpoint, SECRET, patience=PATIENCE) for _ in range(count)]
    for number, client in enumerate(clients):
        own = OwnNode(f"10.0.{number // 100}.{number % 100 + 1}", pid=1, procs=8)
        client.request(Enter("large", settings, own))
    pending = [client.send(JoinNextRound(port=1, failed=False)) for client in clients]
    ranks = []
    for client, one in zip(clients, pending, strict=True):
        assert one.arrived.wait(PATIENCE)
        ranks.append(client.result(one)["rank"])
    assert ranks == list(range(count)), "by address"
    for client in clients:
        client.request(Ping())
        client.close()


def test_where_the_secret_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_SECRET_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"no job secret in .*job.secret: copy that file .*Z2A_JOB_SECRET"):
        find_secret(None, make=False)
    secret, path = find_secret(None, make=True)
    assert (path.stat().st_mode & 0o777, len(secret)) == (0o600, 64)
    assert find_secret(None, make=True)[0] == find_secret(None, make=False)[0] == secret
    path.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        find_secret(None, make=False)
    own = tmp_path / "own"
    own.write_text("short\n")
    own.chmod(0o600)
    with pytest.raises(UsageError, match="has 5 characters, and needs 16"):
        find_secret(own, make=False)
    monkeypatch.setenv(JOB_SECRET_VARIABLE, new_secret())
    assert find_secret(None, make=False)[1] is None
    with pytest.raises(UsageError, match="has 5 characters"):
        find_secret(own, make=False)  # the command line takes precedence


def test_a_secret_that_another_node_is_about_to_write_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(JOB_SECRET_VARIABLE, raising=False)
    file = tmp_path / "below" / "job.secret"
    threading.Timer(0.3, find_secret, (file,), {"make": True}).start()
    assert len(find_secret(file, make=False, patience=PATIENCE)[0]) == 64


class FakeWaits(threading.Event):
    """Ends a loop after the given waits, each of which advances a fake clock."""

    def __init__(self, lengths: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.lengths, self.taken, self.now = lengths, 0, time.monotonic()
        monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=time.sleep))

    def wait(self, timeout: float | None = None) -> bool:
        if self.taken == len(self.lengths):
            return True
        self.now += self.lengths[self.taken]
        self.taken += 1
        return False


@pytest.mark.parametrize("asleep", [0, 3600])
def test_an_agent_that_was_suspended_does_not_take_the_rendezvous_for_lost(
    server: RendezvousServer, monkeypatch: pytest.MonkeyPatch, asleep: int
) -> None:
    """Stopped by Ctrl-Z, or in a virtual machine that was paused. Silence while awake still counts."""
    beat, patience = client_module.HEARTBEAT_INTERVAL, PATIENCE
    client = RendezvousClient(server.endpoint, SECRET, patience)
    awake = int(patience / beat)
    naps = FakeWaits([beat, asleep or beat, *[beat] * 10 * awake], monkeypatch)
    sent: list[str] = []
    monkeypatch.setattr(client, "send", sent.append)  # so that nobody answers
    monkeypatch.setattr(client, "_ending", naps)
    client._last_heard = naps.now
    client._heartbeat_loop()
    with pytest.raises(RendezvousConnectionError, match="no sign of life"):
        client.raise_if_lost()
    assert naps.taken == awake + (3 if asleep else 1)
    assert len(sent) == naps.taken - 1
    client.close()


def test_a_directory_is_no_secret_and_its_mode_is_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(UsageError, match="is a directory: give a file") as raised:
        find_secret(tmp_path, make=False)
    assert "chmod" not in str(raised.value)


def test_an_excluded_node_is_refused_until_it_is_readmitted(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    first, bad = cluster.node(1), cluster.node(2)
    assert sorted(cluster.meet(first, bad)) == [0, 1]
    events: list[JobEvent] = []
    first.on_event = events.append
    broken = FailureFacts(7, "crash", gpu_faults=("PCI:0000:3b:00: Xid 79",))
    assert "Xid 79" in str(bad.report_failure(broken).excluded)
    until(lambda: first.client.status.lost)
    with pytest.raises(NodeExcludedError, match="--readmit"):
        bad.next_rendezvous()
    first.failed = True
    assert cluster.meet(first) == [0]
    assert [event.kind for event in events] == ["node excluded", "job restarted"]
    assert [str(node) for node in first.client.status.excluded] == [
        f"{socket.gethostname()} (10.0.0.2): hardware error: PCI:0000:3b:00: Xid 79"
    ]
    with pytest.raises(NodeExcludedError, match="Xid 79"):
        cluster.node(2)
    assert first.close("failed")
    assert not first.close("done"), "the first one ended it"
    with pytest.raises(NodeExcludedError, match="Xid 79"):
        cluster.node(2)  # the job starts again, and still knows
    config = RendezvousConfig(cluster.server.endpoint, advertise="10.0.0.2", patience=PATIENCE, readmit=True)
    back = Rendezvous(config, cluster.settings, "job", procs=2)
    cluster.stack.callback(back.shutdown)
    assert cluster.meet(back) == [0]
    assert "is readmitted" in capfd.readouterr().err


def test_one_of_many_claims_a_message(cluster: Cluster) -> None:
    nodes = [cluster.node(number) for number in (1, 2, 3)]
    cluster.meet(*nodes)
    assert [node.claim("x") for node in nodes] == [True, False, False]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_nodes_test_each_other_after_a_hang(cluster: Cluster) -> None:
    """Real processes and exchanges; the chaos suite has a node that is really slow."""
    nodes = [cluster.node(1), cluster.node(2)]
    cluster.meet(*nodes)
    for node in nodes:
        node.report_failure(FailureFacts(7, "hang"))
        node.failed = True
    assert sorted(cluster.meet(*nodes)) == [0, 1]
    assert [node.assignment.node_test for node in nodes if node.assignment is not None] == [True, True]
    assert nodes[0].client.status.excluded == ()


@pytest.mark.parametrize("listen", [None, "127.0.0.2"])
def test_without_listen_the_command_serves_its_own_machine(
    listen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bound: list[tuple[str, int]] = []

    class Bound(RendezvousServer):
        def serve(self) -> None:
            bound.append(self._socket.getsockname())
            self._socket.close()

    monkeypatch.setattr(serve_module, "RendezvousServer", Bound)
    monkeypatch.setattr(serve_module, "default_address", lambda: "10.1.2.3")
    serve_module.serve_rendezvous(0, listen, tmp_path / "secret")
    assert [address for address, _ in bound] == [listen or "127.0.0.1"]
    assert ("start it with --rdzv-listen 10.1.2.3:" in capsys.readouterr().err) == (listen is None)
