"""Rules by which a node is excluded from its job, and spares that take its place: pure decisions, with a fake clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.launch.test_rendezvous_state import SETTLED, Cluster
from zero2all.cluster.launch.exit_reason import FailureKind
from zero2all.cluster.launch.gpu_errors import XIDS, GpuErrors, fatal_texts, xid_faults
from zero2all.cluster.launch.rendezvous_state import RendezvousState
from zero2all.cluster.launch.restart_policy import FAILURE_WINDOW, FailureFacts, failures_to_exclude

CRASH = FailureFacts(step=7, kind="crash", by_signal=True)
CUT_OFF = FailureFacts(step=7, kind="cut off")


def names(count: int) -> list[str]:
    return [str(number) for number in range(1, count + 1)]


def fail(cluster: Cluster, bad: str, facts: FailureFacts = CRASH) -> None:
    """The ranks of one node fail and those of the others are cut off; those that stay form the next round."""
    members = cluster.ranks()
    for name in sorted(members, key=lambda name: name != bad):
        cluster.state.exclusions.report_failure(name, facts if name == bad else CUT_OFF)
    for name in members:
        if cluster.state.exclusions.of(name) is None:
            cluster.wait(name, failed=True)
        else:
            cluster.state.leave(name, gracefully=False)
    cluster.pass_time(4.0)


def excluded(state: RendezvousState) -> list[str]:
    return [entry.name for entry in state.status().excluded]


def test_failures_in_a_row_that_chance_does_not_explain_exclude_a_node() -> None:
    cluster = Cluster(*range(8, 17)).join(*names(16))
    for _ in range(failures_to_exclude(16) - 1):
        fail(cluster, "5")
    assert excluded(cluster.state) == []
    fail(cluster, "5")
    assert excluded(cluster.state) == ["5"]
    assert "5" not in cluster.ranks()
    assert len(cluster.ranks()) == 15


def test_failures_of_other_nodes_in_between_speak_for_the_program() -> None:
    cluster = Cluster(*range(8, 17)).join(*names(16))
    for bad in ("5", "5", "3", "5", "5", "7") * 3:
        fail(cluster, bad)
    assert excluded(cluster.state) == []


def test_how_many_failures_it_takes() -> None:
    needed = [failures_to_exclude(nodes) for nodes in (1, 2, 3, 4, 5, 10, 11, 10_000)]
    assert needed == [3, 8, 6, 5, 4, 4, 3, 3]
    assert max(needed) <= FAILURE_WINDOW, "as many are remembered"


def test_a_node_that_gives_up_alone_leaves_and_a_bad_step_clears_it() -> None:
    cluster = Cluster(2, 3).join("1", "2", "3")
    gives_up = FailureFacts(step=7, kind="wrong usage", gives_up=True)
    assert cluster.state.exclusions.report_failure("3", gives_up).excluded is not None, (
        "such as a disk mounted on the others only"
    )
    assert excluded(cluster.state) == ["3"]
    assert cluster.state.exclusions.report_failure("2", gives_up).excluded is None, "it fails on others too"
    assert excluded(cluster.state) == [], "so the first one is not bad"


@pytest.mark.parametrize("kind", ["hang", "cut off", "stopped"])
def test_failures_that_may_come_from_elsewhere_exclude_nobody(kind: FailureKind) -> None:
    cluster = Cluster(1, 2).join("1", "2")
    for _ in range(FAILURE_WINDOW):
        assert cluster.state.exclusions.report_failure("2", FailureFacts(7, kind, gives_up=True)).excluded is None


def test_a_fatal_gpu_fault_excludes_at_once_but_not_the_last_nodes() -> None:
    cluster = Cluster(2, 3).join("1", "2", "3")
    broken = FailureFacts(7, "cut off", gpu_faults=("PCI:0000:3b:00: Xid 79, the card fell off the bus",))
    answer = cluster.state.exclusions.report_failure("1", broken)
    assert "Xid 79" in answer.excluded
    second = cluster.state.exclusions.report_failure("2", broken)
    assert second.excluded is None
    assert "another node" in str(second.kept), "one failure costs one node"
    cluster.state.leave("1", gracefully=False)
    cluster.wait("2", "3", failed=True)
    cluster.pass_time(4.0)
    assert cluster.ranks() == {"2": 0, "3": 1}
    kept = cluster.state.exclusions.report_failure("2", broken).kept
    assert "the others are 1, and the job needs 2: start a spare node" in str(kept)


def test_with_a_spare_the_job_can_do_without_a_node() -> None:
    cluster = Cluster(2).join("1", "2", "3")
    assert cluster.ranks() == {"1": 0, "2": 1}
    cluster.pass_time(SETTLED)
    assert cluster.state.status().spares == 1
    fail(cluster, "1", FailureFacts(7, "crash", gpu_faults=("Xid 79",)))
    assert cluster.ranks() == {"2": 1, "3": 0}
    assert [event.kind for event in cluster.assignments["3"].events] == [
        "node excluded", "spare taken in", "job restarted",
    ]  # fmt: skip
    assert cluster.assignments["2"].events == (), "one node reports"
    assert cluster.state.status().spares == 0


def test_a_spare_replaces_a_lost_node_without_waiting_for_more() -> None:
    cluster = Cluster(2, 4).join("1", "2", "4", "5").join("3")
    cluster.pass_time(SETTLED)
    assert (cluster.state.status().spares, cluster.state.status().change) == (1, False)
    cluster.state.leave("2", gracefully=False)
    before = cluster.now
    cluster.wait("1", "4", "5", failed=True)
    assert cluster.now == before, "at once"
    assert cluster.ranks() == {"1": 0, "3": 1, "4": 2, "5": 3}
    assert [(event.kind, event.node) for event in cluster.assignments["1"].events] == [
        ("node lost", "2 (10.0.0.2)"), ("spare taken in", "3 (10.0.0.3)"), ("job restarted", None),
    ]  # fmt: skip


def test_an_excluded_node_that_trains_saves_first_and_a_waiting_one_is_not_chosen() -> None:
    cluster = Cluster(1, 2).join("1", "2")
    assert cluster.state.exclusions.exclude("2", "straggler", "slow", failed=False) is None
    assert (cluster.state.status().change, cluster.state.status().lost) == (True, ())
    cluster.state.join_next_round("2", 4002, cluster.now)
    cluster.wait("1")
    cluster.pass_time(4.0)
    assert cluster.ranks() == {"1": 0}


def test_a_node_is_readmitted_with_a_clean_record() -> None:
    cluster = Cluster(1, 2).join("1", "2")
    cluster.state.exclusions.report_failure("2", FailureFacts(7, "crash", gives_up=True))
    cluster.state.leave("2", gracefully=False)
    assert cluster.state.exclusions.readmit(("2", "10.0.0.2")) is not None
    assert cluster.state.exclusions.readmit(("2", "10.0.0.2")) is None
    assert cluster.state.exclusions.history.own_failures_in_a_row(("2", "10.0.0.2")) == 0
    assert excluded(cluster.state) == []


def test_exclusions_survive_a_new_rendezvous_but_not_a_readmission() -> None:
    old = Cluster(1, 2).join("1", "2")
    old.state.exclusions.exclude("2", "GPU", "Xid 79", failed=True)
    new = Cluster(1, 2).join("1", "2")  # the bad node came before anybody who knows
    new.state.exclusions.learn(old.state.status().excluded)
    assert new.state.exclusions.of("2") is not None
    fresh = Cluster(1, 2)
    fresh.state.exclusions.readmit(("2", "10.0.0.2"))
    fresh.join("1", "2")
    fresh.state.exclusions.learn(old.state.status().excluded)
    assert fresh.state.exclusions.of("2") is None


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["crash", "give up", "GPU", "lose", "join", "straggler", "time"]), st.integers(1, 12)
    ),
    max_size=60,
)  # fmt: skip


def blame(cluster: Cluster, action: str, name: str) -> None:
    if action == "straggler":
        cluster.state.exclusions.exclude(name, "straggler", "slow", failed=False)
        return
    facts = {
        "crash": CRASH,
        "give up": FailureFacts(int(name), "crash", gives_up=True),
        "GPU": FailureFacts(7, "hang", gpu_faults=("Xid 79",)),
    }
    fail(cluster, name, facts[action])


@settings(max_examples=150, deadline=None)
@given(counts=st.sampled_from([(1, 2, 3), (2,), (2, 4, 8), tuple(range(3, 11)), (6,)]), actions=ACTIONS)
def test_any_sequence_keeps_the_rules(counts: tuple[int, ...], actions: list[tuple[str, int]]) -> None:
    """Never below the minimum, never two nodes for one failure, never an excluded node in a round."""
    cluster = Cluster(*counts).join(*names(counts[-1] + 1))
    cluster.pass_time(SETTLED)
    for action, number in actions:
        state, listed, name = cluster.state, set(excluded(cluster.state)), str(number)
        members = [id for id in state.membership.nodes if id in cluster.ranks()]
        if action == "time":
            cluster.pass_time(SETTLED)
        elif action == "lose":
            state.leave(name, gracefully=False)
        elif action == "join":
            if name not in state.membership.nodes and (name, f"10.0.0.{name}") not in state.exclusions.entries:
                cluster.join(name)
        elif name in members and state.status().running:
            blame(cluster, action, name)
        new = set(excluded(state)) - listed
        assert len(new) <= 1, "two nodes for one failure"
        if new:
            left = [id for id in state.membership.nodes if state.exclusions.of(id) is None]
            assert len(left) >= counts[0], "the job cannot go on"
        if not set(members) & state.membership.nodes.keys() or state.status().lost or state.status().change:
            for id in list(state.membership.nodes):
                if state.membership.nodes[id].waiting_since is None:
                    state.join_next_round(id, 4000, cluster.now, failed=True)
            cluster.pass_time(4.0)
        if state.status().running:
            assert not set(excluded(state)) & set(cluster.ranks())


LOG = """[    1.5] eth0: link up
[   20.25] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.
[   21.00] NVRM: Xid (PCI:0000:3b:00): 31, pid=1, MMU fault
[   22.00] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up
[   23.00] NVRM: Xid (PCI:0000:3b:00): 999, unknown
"""


def test_xids_of_the_kernel_log_since_the_start() -> None:
    faults = xid_faults(10.0, LOG)
    assert [fault.fatal for fault in faults] == [True, False, False, True]
    assert str(faults[0]).startswith("PCI:0000:3b:00: Xid 79, the card fell off the bus")
    assert [text[:24] for text in fatal_texts(faults)] == ["PCI:0000:3b:00: Xid 79, ", "NVSwitch 3: SXid 20034, "]
    assert xid_faults(30.0, LOG) == [], "it was before the job"
    assert xid_faults(0.0, "nothing") == []
    assert not XIDS[94].fatal, "NVIDIA asks for a restart of the program"


def test_new_memory_errors_in_the_driver_s_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["00000000:3B:00.0", "2", "No"], ["00000000:5E:00.0", "[N/A]", "No"]]
    monkeypatch.setattr("zero2all.cluster.launch.gpu_errors._read_counters", lambda: rows)
    monkeypatch.setattr("zero2all.cluster.launch.gpu_errors.program_output", lambda *words, timeout: "")
    errors = GpuErrors(since=0.0)
    assert errors.faults() == [], "they were there before"
    rows[0][1], rows[1][2] = "5", "Yes"
    assert fatal_texts(errors.faults()) == (
        "00000000:3B:00.0: 3 memory errors that could not be corrected (ECC)",
        "00000000:5E:00.0: memory rows could not be remapped",
    )
