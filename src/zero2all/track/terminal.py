"""``z2a watch --once``: the status of runs in a terminal."""

from __future__ import annotations

from dataclasses import dataclass, field

from zero2all.console import sanitize
from zero2all.findings import Finding
from zero2all.track.goodput import GoodputReport, compute_run_goodput, format_goodput
from zero2all.track.health_checks import check_health
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunStatus, RunView, error_message
from zero2all.track.step_text import step_line


@dataclass(frozen=True)
class CheckedStatus(RunStatus):
    """What ``--once --json`` prints for a run."""

    verdicts: list[Finding] = field(default_factory=list)
    lost_time: GoodputReport | None = None
    """Of a run on this machine."""


@dataclass(frozen=True)
class FailedStatus:
    """The same for a run that cannot be shown."""

    name: str
    trouble: str
    verdicts: list[Finding] = field(default_factory=list)


def checked_status(run: RunView) -> CheckedStatus | FailedStatus:
    try:
        return CheckedStatus(**vars(run.status()), verdicts=safe_check_health(run), lost_time=_goodput(run))
    except Exception as error:  # the other runs are still shown
        return FailedStatus(run.name, error_message(error))


def _goodput(run: RunView) -> GoodputReport | None:
    return compute_run_goodput(run.location.directory) if isinstance(run.location, LocalRunLocation) else None


def health_report_lines(run: RunView) -> list[str]:
    """What ``--once`` prints for a run. Names and reasons come from files, so escape sequences are removed."""
    return [sanitize(line) for line in _health_report_lines(run)]


def _health_report_lines(run: RunView) -> list[str]:
    try:
        status, goodput = run.status(), _goodput(run)
    except Exception as error:
        return [f"{run.name}: {error_message(error)}"]
    lines = [f"{run.name}: {_progress_line(status)}  ({status.ended or 'running'})"]
    lines += [] if goodput is None else [f"  {format_goodput(goodput)}"]
    if status.trouble:
        lines.append(f"  cannot be read: {status.trouble}")
    findings = [f"  {finding}".replace("\n", "\n  ") for finding in safe_check_health(run)]
    return lines + (findings or ([] if status.trouble else ["  no problems found"]))


def _progress_line(status: RunStatus) -> str:
    """As the log of training prints it."""
    if status.step is None:
        return "no step yet"
    return step_line(status.step + 1, status.steps, status.latest, status.seconds_left)


def safe_check_health(run: RunView) -> list[Finding]:
    """The findings on a run. A failing check becomes a finding, so that the other runs are still shown."""
    try:
        return check_health(run)
    except Exception as error:
        return [Finding("bad", "check failed", error_message(error))]
