"""The rendezvous over real sockets: nodes that come and go, and strangers that would like to be one of them."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from zero2all.errors import UsageError
from zero2all.parallel.store import store_of_ranks
from zero2all.resilience import link as link_module
from zero2all.resilience.host import Host
from zero2all.resilience.link import JobEndedError, Link, LinkStore, WrongSecretError
from zero2all.resilience.rendezvous import Place, Rendezvous
from zero2all.resilience.rounds import Rules, rules_message
from zero2all.resilience.secret import VARIABLE, find_secret, new_secret
from zero2all.resilience.wire import MAGIC, NONCE, Channel, TamperedError

SECRET = "correct horse battery staple"
PATIENCE = 60.0
QUICK = Rules((1, 2, 3), settle=0.3, last_call=0.3)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv(VARIABLE, SECRET)
    host = Host("127.0.0.1", 0, SECRET)
    host.start()
    yield host
    host.stop()


class Cluster:
    def __init__(self, host: Host, stack: ExitStack, rules: Rules) -> None:
        self.host, self.stack, self.rules = host, stack, rules

    def node(self, number: int, job: str = "job") -> Rendezvous:
        place = Place(self.host.place, advertise=f"10.0.0.{number}", patience=PATIENCE)
        found = Rendezvous(place, self.rules, job, procs=2)
        self.stack.callback(found.shutdown)
        return found

    def meet(self, *nodes: Rendezvous) -> list[int]:
        """All of them wait at once; their ranks."""
        found: dict[int, int] = {}

        def wait(number: int, node: Rendezvous) -> None:
            found[number] = node.next_rendezvous().rank

        threads = [threading.Thread(target=wait, args=item) for item in enumerate(nodes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        return [found[number] for number in range(len(nodes))]


@pytest.fixture
def cluster(host: Host) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(host, stack, QUICK)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def listening() -> set[str]:
    """Addresses at which this process listens, as the kernel writes them."""
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
    node = Rendezvous(Place(), Rules((1,)), "job", procs=2)
    try:
        info = node.next_rendezvous()
        assert listening() - before <= {"0100007F"}
        assert node.host is not None
        assert info.bootstrap_store_info is not None
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
    store = store_of_ranks(timedelta(seconds=PATIENCE))
    assert store is not None
    store.set("key", "value")
    assert listening() - before <= {"0200007F"}
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert store_of_ranks(timedelta(seconds=1)) is None, "torchrun has its own"


def test_the_given_address_alone_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    before = listening()
    node = Rendezvous(Place("127.0.0.3:0", patience=1.0), Rules((1, 2)), "job", procs=1)
    try:
        assert listening() - before <= {"0300007F"}
    finally:
        node.shutdown()


def test_nodes_meet_lose_one_another_and_meet_again(cluster: Cluster) -> None:
    third, first, second = cluster.node(3), cluster.node(1), cluster.node(2)
    assert cluster.meet(third, first, second) == [2, 0, 1]
    assert third.seat is not None
    assert (third.seat.first_rank, third.seat.ranks, third.seat.master) == (4, 6, "10.0.0.1")
    assert first.num_nodes_waiting() == 0
    second.shutdown()  # as if it was killed: it has not said that it leaves
    until(lambda: first.lost_for() is not None and third.lost_for() is not None)
    assert first.link.status.lost == (f"{socket.gethostname()} (10.0.0.2)",)
    first.failed = third.failed = True
    assert cluster.meet(first, third) == [0, 1]
    assert (first.lost_for(), first.num_nodes_waiting()) == (None, 0)
    late = cluster.node(2)
    waits = threading.Thread(target=late.next_rendezvous)
    waits.start()
    until(lambda: first.num_nodes_waiting() and third.num_nodes_waiting())
    assert cluster.meet(third, first) == [2, 0]
    waits.join(PATIENCE)
    late.leave()
    until(lambda: first.num_nodes_waiting())
    assert first.lost_for() is None, "it left with notice"


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


def test_a_spare_ends_with_the_job(host: Host) -> None:
    with ExitStack() as stack:
        cluster = Cluster(host, stack, replace(QUICK, counts=(1,)))
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


def test_jobs_at_one_place_do_not_mix_and_other_numbers_of_nodes_are_refused(cluster: Cluster) -> None:
    assert cluster.meet(cluster.node(1, "a")) == [0]
    assert cluster.meet(cluster.node(2, "b")) == [0]
    cluster.rules = Rules((5,))
    with pytest.raises(UsageError, match=r"runs on 1:3 nodes, .* asks for 5: give the same --nodes"):
        cluster.node(3, "a")


def test_a_rendezvous_that_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    host = Host("127.0.0.1", 0, SECRET)
    host.start()
    with ExitStack() as stack:
        cluster = Cluster(host, stack, QUICK)
        node = cluster.node(1)
        cluster.meet(node)
        host.stop()
        with pytest.raises(RendezvousConnectionError):
            until(lambda: node.num_nodes_waiting())
        with pytest.raises(RendezvousConnectionError):
            node.next_rendezvous()
        cluster.host = Host("127.0.0.1", host.port, SECRET)
        cluster.host.start()
        stack.callback(cluster.host.stop)
        assert cluster.meet(cluster.node(1)) == [0]


def test_clocks_that_are_hours_apart_do_not_matter(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: 3600.0 * (next(jumps) % 48))
    monkeypatch.setattr(link_module, "BEAT", 0.05)
    one, other = cluster.node(1), cluster.node(2)
    assert cluster.meet(one, other) == [0, 1]
    beats = one.link._number
    until(lambda: one.link._number > beats + 10)
    assert (one.lost_for(), other.num_nodes_waiting()) == (None, 0)


def test_a_node_with_another_secret_is_refused_by_name(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    name = socket.gethostname()
    with pytest.raises(WrongSecretError, match=rf"node {name} \(127.0.0.1\) was refused .* wrong job secret: copy"):
        Link(host.place, "quite another secret", patience=PATIENCE)
    until(lambda: f"node {name} (127.0.0.1) was refused: wrong job secret" in capsys.readouterr().err)


class Bomb:
    """What runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.mark),)


def test_strangers_run_no_code_and_do_not_disturb(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(mark))
    one, other = cluster.node(1), cluster.node(2)
    cluster.meet(one, other)
    name = b"\x1b[2Jevil"
    hellos = [
        b"",
        bomb,
        bytes(NONCE) + bytes([len(name)]) + name + bytes(32) + bomb,
        b"GET / HTTP/1.0\r\n\r\n" * 10,
        os.urandom(5000),
        b"\xff" * 5000,
    ]
    for hello in hellos:
        with socket.create_connection(("127.0.0.1", cluster.host.port)) as stranger, suppress(OSError):
            stranger.sendall(hello)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(PATIENCE)
            while stranger.recv(1 << 16):
                pass
    with pytest.raises(RuntimeError):  # the way of old: a client of torch's store
        TCPStore("127.0.0.1", cluster.host.port, is_master=False, timeout=timedelta(seconds=2)).set("key", "value")
    assert cluster.meet(one, other) == [0, 1]
    assert not mark.exists()
    said = capsys.readouterr().err
    assert "\x1b[2J" not in said
    assert "Traceback" not in said


def test_a_stranger_that_plays_the_rendezvous_is_not_believed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(mark))
    for answer in (bomb * 10, MAGIC + bytes(NONCE) + b"\1" + bytes(32) + bomb, MAGIC + bytes(NONCE) + b"\0"):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def play(server: socket.socket = server, answer: bytes = answer) -> None:
                found, _ = server.accept()
                with found, suppress(OSError):
                    found.sendall(answer)
                    found.recv(1 << 16)

            thread = threading.Thread(target=play)
            thread.start()
            with pytest.raises(UsageError, match=r"something else than|does not know the job secret|wrong job secret"):
                Link(f"127.0.0.1:{server.getsockname()[1]}", SECRET, patience=PATIENCE)
            thread.join(PATIENCE)
    assert not mark.exists()


def test_frames_that_are_changed_repeated_or_sent_back_are_refused() -> None:
    secret, nonces = SECRET.encode(), (b"s" * NONCE, b"c" * NONCE)
    client, server = Channel(secret, *nonces, is_server=False), Channel(secret, *nonces, is_server=True)
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
        Channel(secret, b"t" * NONCE, nonces[1], is_server=True).open(later)  # of another connection
    assert server.open(later) == {"op": "beat"}


def test_requests_that_make_no_sense_are_answered(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """Of somebody who knows the secret, such as a node of another version."""
    link = Link(host.place, SECRET, patience=PATIENCE)
    for operation, fields in (
        ("fly", {}),
        ("wait", {}),
        ("enter", {"job": "a", "rules": {"counts": []}, "node": {}}),
        ("enter", {"job": "a", "rules": 5, "node": {}}),
        ("set", {"values": [1]}),
    ):
        with pytest.raises(UsageError, match="refused"):
            link.ask(operation, **fields)
    link.ask("beat")
    link.close()
    assert "Traceback" not in capsys.readouterr().err


def test_values_travel_between_the_agents_and_the_ranks(cluster: Cluster) -> None:
    node = cluster.node(1)
    cluster.meet(node)
    rank = LinkStore.of_this_rank(cluster.host.place, "job", timedelta(seconds=PATIENCE))
    store = LinkStore(node.link, timedelta(seconds=PATIENCE))
    threading.Timer(0.2, store.set, ("late", b"\x00\xffbytes")).start()
    assert rank.get("late") == b"\x00\xffbytes"
    assert (rank.add("count", 2), store.add("count", 3), rank.check(["count"]), rank.check(["none"])) == (
        2,
        5,
        True,
        False,
    )
    with pytest.raises(RuntimeError, match="none is not there after"):
        rank.wait(["none"], timedelta(seconds=0.1))
    assert store.delete_key("count")
    node.failed = True
    cluster.meet(node)
    assert not rank.check(["late"]), "what belonged to the round before is gone"


def test_hundreds_of_nodes_join(host: Host) -> None:
    rules, count = Rules((200,)), 200
    links = [Link(host.place, SECRET, patience=PATIENCE) for _ in range(count)]
    for number, link in enumerate(links):
        own = {"address": f"10.0.{number // 100}.{number % 100 + 1}", "pid": 1, "procs": 8}
        link.ask("enter", job="large", rules=rules_message(rules), node=own)
    pending = [link.send("wait", port=1, failed=False) for link in links]
    seats = []
    for link, one in zip(links, pending, strict=True):
        assert one.arrived.wait(PATIENCE)
        seats.append(link.value(one)["rank"])
    assert seats == list(range(count)), "by address"
    for link in links:
        link.ask("beat")
        link.close()


def test_where_the_secret_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"no job secret in .*job.secret: copy that file .*Z2A_JOB_SECRET"):
        find_secret(None, make=False)
    secret, path = find_secret(None, make=True)
    assert path is not None
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
    monkeypatch.setenv(VARIABLE, new_secret())
    assert find_secret(None, make=False)[1] is None
    with pytest.raises(UsageError, match="has 5 characters"):
        find_secret(own, make=False)  # what is said on the command line comes first


def test_a_secret_that_another_node_is_about_to_write_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    file = tmp_path / "below" / "job.secret"
    threading.Timer(0.3, find_secret, (file, True)).start()
    assert len(find_secret(file, make=False, patience=PATIENCE)[0]) == 64


class Naps(threading.Event):
    """Ends a loop after the given waits; each lasts as many seconds of the clock as it says."""

    def __init__(self, lengths: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.lengths, self.taken, self.now = lengths, 0, time.monotonic()
        monkeypatch.setattr(link_module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=time.sleep))

    def wait(self, timeout: float | None = None) -> bool:
        if self.taken == len(self.lengths):
            return True
        self.now += self.lengths[self.taken]
        self.taken += 1
        return False


@pytest.mark.parametrize("asleep", [0, 3600])
def test_an_agent_that_was_asleep_does_not_take_the_rendezvous_for_lost(
    host: Host, monkeypatch: pytest.MonkeyPatch, asleep: int
) -> None:
    """Stopped by Ctrl-Z, or in a virtual machine that was paused. Silence while awake still counts."""
    beat, patience = link_module.BEAT, PATIENCE
    link = Link(host.place, SECRET, patience)
    awake = int(patience / beat)
    naps = Naps([beat, asleep or beat, *[beat] * 10 * awake], monkeypatch)
    sent: list[str] = []
    monkeypatch.setattr(link, "send", sent.append)  # so that nobody answers
    monkeypatch.setattr(link, "_ending", naps)
    link._heard = naps.now
    link._beat()
    with pytest.raises(RendezvousConnectionError, match="no sign of life"):
        link.must_be_there()
    assert naps.taken == awake + (3 if asleep else 1)
    assert len(sent) == naps.taken - 1
    link.close()


def test_a_directory_is_no_secret_and_its_mode_is_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(UsageError, match="is a directory: give a file") as raised:
        find_secret(tmp_path, make=False)
    assert "chmod" not in str(raised.value)
