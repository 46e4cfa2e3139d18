"""The control plane with simulated agents: its cost for each of them does not grow with their number."""

from __future__ import annotations

import functools

import pytest

from tests.chaos import scale_model
from tests.chaos.scale_model import ScaleReport, render_report, simulate
from zero2all.base.errors import UsageError
from zero2all.cluster.launch.rendezvous_messages import HEARTBEAT_INTERVAL, RendezvousSettings


def messages_of_recovery(report: ScaleReport) -> float:
    """For each agent, without heartbeats and their answers."""
    return report.recover_messages_per_agent - 2 * report.lost_recovered / HEARTBEAT_INTERVAL


@pytest.mark.timeout(120)
def test_64_agents_meet_lose_two_and_meet_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The status used to be sent to every agent for every agent that returned: 70 messages each at 64."""
    dead_after = 4.0
    quick = functools.partial(RendezvousSettings, last_call=0.3, dead_after=dead_after)
    monkeypatch.setattr(scale_model, "RendezvousSettings", quick)
    report = simulate(64, steady=HEARTBEAT_INTERVAL)
    assert report.meet_rounds == 1
    assert report.meet < 15
    assert report.lost_noticed < 5
    assert dead_after - HEARTBEAT_INTERVAL <= report.silent_noticed < 15
    assert 40 < report.steady_messages_per_second < 90, "a heartbeat and its answer for each, every two seconds"
    assert report.meet_messages_per_agent < 12
    assert messages_of_recovery(report) < 10
    assert report.server_descriptors < 100
    assert "64 nodes meet (512 ranks)" in render_report(report)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_1024_agents_meet_within_a_minute_and_the_server_needs_half_a_core() -> None:
    report = simulate(1024, steady=20)
    assert report.meet < 60
    assert report.meet_rounds == 1
    assert max(report.lost_noticed, report.silent_noticed) < 15
    assert report.steady_server_cores < 0.5
    assert messages_of_recovery(report) < 10


@pytest.mark.long
@pytest.mark.timeout(600)
def test_agents_that_arrive_over_half_a_minute_are_one_round() -> None:
    assert simulate(512, steady=2, over=30).meet_rounds == 1


def test_too_few_agents_or_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="at least 4"):
        simulate(3)
    monkeypatch.setattr(scale_model, "raise_descriptor_limit", lambda: 1024)
    with pytest.raises(UsageError, match=r"1088 open files in the server, and this user may have 1024: raise the hard"):
        simulate(1024)
