"""Where a node listens and where it is reached, and nodes that do not reach each other."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from torch.distributed.elastic.rendezvous import RendezvousInfo

from zero2all.base.environment import JOB_SECRET_VARIABLE
from zero2all.base.errors import UsageError
from zero2all.base.network.addresses import HostPort, NodeAddress, find_node_address
from zero2all.cluster.doctor.reachability import ProbeListener, Target, probe
from zero2all.cluster.launch.node_links import UnreachableNodesError
from zero2all.cluster.launch.reach_check import peers_to_try
from zero2all.cluster.launch.rendezvous import Rendezvous
from zero2all.cluster.launch.rendezvous_host import RendezvousConfig
from zero2all.cluster.launch.rendezvous_messages import RendezvousSettings
from zero2all.cluster.launch.rendezvous_server import RendezvousServer

SECRET = "a secret of a test"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1", "10.0.0.1", None),
        ("10.0.0.1:29501", "10.0.0.1", 29501),
        ("host.example:29501", "host.example", 29501),
        ("fd00::1", "fd00::1", None),
        ("[fd00::1]", "fd00::1", None),
        ("[fd00::1]:29501", "fd00::1", 29501),
        ("eth1", "eth1", None),
        ("29501", "", 29501),
    ],
)
def test_an_address_may_have_a_port(text: str, host: str, port: int | None) -> None:
    assert HostPort.parse(text, "--advertise") == HostPort(host, port)


@pytest.mark.parametrize("text", ["10.0.0.1:", "10.0.0.1:0", "10.0.0.1:70000", "host:port", "fd00::g:29501", "a:b:1"])
def test_a_malformed_address_is_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError, match=r"--advertise is .*HOST:PORT"):
        HostPort.parse(text, "--advertise")


def test_inside_and_outside_of_a_port_map() -> None:
    endpoint = "127.0.0.1:29500"
    assert find_node_address(endpoint, None, None, several=True) == NodeAddress("127.0.0.1", "127.0.0.1")
    mapped = find_node_address(endpoint, "192.0.2.1:30501", "lo:29501", several=True)
    assert mapped == NodeAddress("127.0.0.1", "192.0.2.1", 29501, 30501)
    assert mapped.is_mapped
    assert find_node_address(endpoint, "192.0.2.1:30501", None, several=True).local_port == 30501, (
        "the same port if not given"
    )
    assert find_node_address(endpoint, "127.0.0.7", None, several=True).local == "127.0.0.7", (
        "its own address chooses it"
    )
    with pytest.raises(UsageError, match=r"--listen is 192.0.2.1, .*it has .*lo 127.0.0.1"):
        find_node_address(endpoint, None, "192.0.2.1", several=True)


def test_a_probe_tells_the_right_listener_from_others() -> None:
    with ProbeListener("127.0.0.1", 0, "right", SECRET) as listener:
        target = Target("127.0.0.1", listener.address.port, "data")
        assert probe(target, "right", SECRET).problem is None
        assert (probe(target, "right", SECRET, send_for=0.05).bytes_per_second or 0) > 1e6
        for name, secret in (("wrong", SECRET), ("right", "a secret of another job")):
            assert "another machine has the same address" in (probe(target, name, secret).problem or "")
    assert "nothing listens there" in (probe(target, "right", SECRET).problem or "")
    assert "does not resolve" in (probe(Target("no-such-host.invalid", 9, "data"), "right", SECRET).problem or "")


def test_a_large_job_tries_a_few_nodes_each_and_together_all_of_them() -> None:
    assert peers_to_try(1, 3) == [0, 2]
    tried = {rank: peers_to_try(rank, 1000) for rank in range(1000)}
    assert max(map(len, tried.values())) <= 11
    assert {peer for peers in tried.values() for peer in peers} == set(range(1000))
    assert all(0 in peers for rank, peers in tried.items() if rank)


@contextmanager
def job(monkeypatch: pytest.MonkeyPatch, *counts: int) -> Iterator[Callable[..., Rendezvous]]:
    """A rendezvous; yields a function that adds a node, which checks its network."""
    monkeypatch.setenv(JOB_SECRET_VARIABLE, SECRET)
    monkeypatch.setattr("zero2all.cluster.launch.reach_check.MEETING_TIMEOUT", 20.0)  # of a busy machine
    settings = RendezvousSettings(counts, settle=0.3, last_call=0.3, longest_call=1.0)
    with ExitStack() as stack:
        server = RendezvousServer("127.0.0.1", 0, SECRET)
        server.start()
        stack.callback(server.stop)

        def add(advertise: str, listen: str | None = None) -> Rendezvous:
            reached = {"advertise": advertise, "listen_ranks": listen, "check_network": True}
            node = Rendezvous(RendezvousConfig(server.endpoint, **reached, patience=30.0), settings, "job", procs=1)
            stack.callback(node.shutdown)
            return node

        yield add


def meet(*nodes: Rendezvous) -> list[RendezvousInfo | Exception]:
    def one(node: Rendezvous) -> RendezvousInfo | Exception:
        try:
            return node.next_rendezvous()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(one, nodes))


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as found:
        return int(found.getsockname()[1])


def test_the_first_node_gets_its_own_address_and_the_others_the_advertised_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(monkeypatch, 2) as add:
        port = free_port("127.0.0.2")
        for found in meet(add(f"127.0.0.2:{port}"), add("127.0.0.3")):
            assert isinstance(found, RendezvousInfo), found
            store = found.bootstrap_store_info
            assert (store.master_addr, store.master_port) == ("127.0.0.2", port)


def test_a_port_map_that_leads_nowhere_is_an_error_on_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(monkeypatch, 3) as add:
        port, wrong = free_port("127.0.0.2"), free_port("127.0.0.1")
        for error in meet(add(f"localhost:{wrong}", f"127.0.0.2:{port}"), add("127.0.0.3"), add("127.0.0.4")):
            assert isinstance(error, UnreachableNodesError), error
            text = str(error)
            assert f"at localhost:{wrong} (TCP, the store of the ranks): refused" in text
            assert f"allow TCP {port} from 127.0.0.1" in text, "the port on the node itself"
            assert text.count("cannot reach") == 2, "by both others, and nothing else is wrong"


def test_an_unreachable_node_that_comes_later_leaves_and_the_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(monkeypatch, 1, 2, 3) as add:
        old = [add("127.0.0.2"), add("127.0.0.3")]
        assert all(isinstance(found, RendezvousInfo) for found in meet(*old))
        late = add(f"127.0.0.1:{free_port('127.0.0.9')}", "127.0.0.9")  # becomes the first, and is unreachable
        *others, refused = meet(*old, late)
        assert isinstance(refused, UnreachableNodesError), refused
        for info in others:
            assert isinstance(info, RendezvousInfo), info
            assert info.world_size == 2
