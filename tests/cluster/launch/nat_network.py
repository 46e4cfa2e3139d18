"""A node behind a port map, as a container on a host, and nodes outside."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.chaos.simulated_nodes import (
    SimulatedNode,
    simulated_network,
    simulation_unavailable_reason,
)

HOST, INSIDE = "10.77.0.1", "172.30.0.2"
RENDEZVOUS, RENDEZVOUS_INSIDE = 30846, 9527
STORE, STORE_INSIDE = 30501, 29501
UDP, UDP_INSIDE = 31820, 51820

PORT_MAP = f"""
table ip nat {{
  chain prerouting {{
    type nat hook prerouting priority -100;
    iifname "cable" tcp dport {RENDEZVOUS} dnat to {INSIDE}:{RENDEZVOUS_INSIDE}
    iifname "cable" tcp dport {STORE} dnat to {INSIDE}:{STORE_INSIDE}
    iifname "cable" udp dport {UDP} dnat to {INSIDE}:{UDP_INSIDE}
  }}
  chain postrouting {{
    type nat hook postrouting priority 100;
    MASQUERADE
  }}
}}
"""


HOST_SETUP = """
ip link add name port type veth peer name cable netns $1
ip address add 172.30.0.1/24 dev port
ip link set port up
echo 1 >/proc/sys/net/ipv4/ip_forward
"""
INSIDE_SETUP = f"""
ip address add {INSIDE}/24 dev cable
ip link set cable up
ip route add default via 172.30.0.1
"""


@dataclass(frozen=True)
class NatNetwork:
    inside: SimulatedNode
    """Reached from outside only at the mapped ports of the host."""
    host: SimulatedNode
    outside: list[SimulatedNode]


def unavailable_reason(*programs: str) -> str | None:
    missing = [program for program in ("nft", *programs) if shutil.which(program) is None]
    return f"needs {', '.join(missing)}" if missing else simulation_unavailable_reason()


@contextmanager
def nat_network(outside: int, routed: bool) -> Iterator[NatNetwork]:
    """``routed``: the nodes outside also have a route to the address inside; otherwise the host masquerades it."""
    with simulated_network(1 + outside) as network:
        host, *others = network.nodes
        inside = SimulatedNode(f"{host.name}-inside", INSIDE)
        try:
            host.run("sh", "-ec", HOST_SETUP, "sh", str(inside.pid))
            inside.run("sh", "-ec", INSIDE_SETUP)
            masquerade = "" if routed else 'oifname "cable" masquerade'
            load_rules(host, PORT_MAP.replace("MASQUERADE", masquerade))
            for node in others if routed else ():
                node.run(*f"ip route add 172.30.0.0/24 via {HOST}".split())
            yield NatNetwork(inside, host, others)
        finally:
            inside.shut_down()


def load_rules(node: SimulatedNode, rules: str) -> None:
    node.run("sh", "-c", f"nft -f - <<'RULES'\n{rules}\nRULES")
