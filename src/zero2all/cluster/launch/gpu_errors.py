"""Hardware errors of GPUs: Xids in the kernel log, and the driver's counters of ECC and NVLink errors."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from zero2all.base.package_data import read_package_table
from zero2all.base.processes import program_output


@dataclass(frozen=True)
class Xid:
    """``fatal``: the card or its links are bad, so a restart on this node would fail again. NVIDIA's catalog of Xids
    asks for a reset, a reboot or an inspection after it; after the others, for a restart of the program."""

    number: int
    meaning: str
    fatal: bool = False


XIDS = {
    int(number): Xid(int(number), **entry) for number, entry in read_package_table(__package__, "xids.toml").items()
}
SWITCH_FAULT = "an NVSwitch reported a fatal error: reset the cards and the switch"
_XID_LINE = re.compile(r"^\[\s{0,20}([\d.]{1,30})\].{0,200}?NVRM: Xid \(([^)\n]{1,64})\): (\d{1,6})", re.MULTILINE)
_SWITCH_LINE = re.compile(
    r"^\[\s{0,20}([\d.]{1,30})\].{0,200}?nvidia-nvswitch(\d{1,4}): SXid \([^)\n]{0,64}\): (\d{1,6}), Fatal",
    re.MULTILINE,
)
_LINK_LINE = re.compile(r"^\s{0,20}Link (\d{1,3}): ([A-Za-z ]{1,40}) Errors?: (\d{1,18})\s*$")
_GPU_LINE = re.compile(r"^(GPU \d{1,4}): ")
DRIVER_TIMEOUT = 5.0  # seconds: it does not answer on a sick node
POLL_INTERVAL = 60.0  # seconds: each poll starts nvidia-smi twice
_COUNTERS = "pci.bus_id,ecc.errors.uncorrected.volatile.total,remapped_rows.failure"


@dataclass(frozen=True)
class GpuFault:
    device: str
    text: str
    fatal: bool

    def __str__(self) -> str:
        return f"{self.device}: {self.text}"


def xid_faults(since: float, log: str | None = None) -> list[GpuFault]:
    """The faults in the kernel log; ``since`` in seconds after boot."""
    log = program_output("dmesg", timeout=DRIVER_TIMEOUT) if log is None else log
    found = []
    for when, card, number in _XID_LINE.findall(log):
        if float(when) >= since:
            xid = XIDS.get(int(number), Xid(int(number), "see NVIDIA’s list of Xids"))
            found.append(GpuFault(card, f"Xid {number}, {xid.meaning}", xid.fatal))
    for when, switch, number in _SWITCH_LINE.findall(log):
        if float(when) >= since:
            found.append(GpuFault(f"NVSwitch {switch}", f"SXid {number}, {SWITCH_FAULT}", fatal=True))
    return found


class GpuErrors:
    """The errors since this was created. Where the kernel log may not be read, the counters still show them.

    >>> errors = GpuErrors(since=boot_seconds)
    >>> [str(fault) for fault in errors.faults()]
    ['PCI:0000:41:00: Xid 79, the card fell off the bus: reboot the node, and replace the card if it recurs']
    """

    def __init__(self, since: float) -> None:
        self._since = since
        self._before = _uncorrected_errors(_read_counters())
        self._links_before = _read_link_errors()

    def faults(self) -> list[GpuFault]:
        rows = _read_counters()
        found = xid_faults(self._since)
        for (card, link, kind), count in _read_link_errors().items():
            if (new := count - self._links_before.get((card, link, kind), 0)) > 0:
                # Links retry by themselves: the link is slow, but data is right. Xid 74 says when it is dead.
                found.append(GpuFault(card, f"NVLink {link} has {new} new {kind} errors: check the link", fatal=False))
        for card, count in _uncorrected_errors(rows).items():
            if (new := count - self._before.get(card, 0)) > 0:
                found.append(GpuFault(card, f"{new} memory errors that could not be corrected (ECC)", fatal=True))
        failed = [row[0] for row in rows if row[2].lower() in ("yes", "1")]
        return [*found, *(GpuFault(card, "memory rows could not be remapped", fatal=True) for card in failed)]


class GpuErrorPoll:
    """Reports each new fault once, while the ranks train: a bad card is known before it stops the job.

    >>> with GpuErrorPoll(errors, report=lambda fault: say(f"warning: {fault}")):
    ...     agent.run()
    """

    def __init__(self, errors: GpuErrors, report: Callable[[GpuFault], None]) -> None:
        self._errors, self._report = errors, report
        self._reported: set[tuple[str, str]] = set()
        self._stop = threading.Event()
        # nvidia-smi takes seconds on a sick node, so it must not block the loop that detects failures.
        self._thread = threading.Thread(target=self._run, name="z2a-gpu-errors", daemon=True)

    def __enter__(self) -> GpuErrorPoll:
        if shutil.which("nvidia-smi") is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def poll(self) -> None:
        for fault in self._errors.faults():
            # A counter that goes on growing is one fault, not one per minute.
            kind = (fault.device, re.sub(r"\b\d{1,18} (new|memory)", r"N \1", fault.text))
            if kind not in self._reported:
                self._reported.add(kind)
                self._report(fault)

    def _run(self) -> None:
        while not self._stop.wait(POLL_INTERVAL):
            self.poll()


def fatal_texts(faults: Iterable[GpuFault]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(fault) for fault in faults if fault.fatal))


def _uncorrected_errors(rows: list[list[str]]) -> Mapping[str, int]:
    return {row[0]: int(row[1]) for row in rows if row[1].isdigit()}  # "[N/A]" on cards without ECC


def _read_counters() -> list[list[str]]:
    """Card, uncorrected memory errors since the driver was loaded, and whether remapping rows has failed."""
    found = program_output("nvidia-smi", f"--query-gpu={_COUNTERS}", "--format=csv,noheader", timeout=DRIVER_TIMEOUT)
    rows = [[word.strip() for word in line.split(",")] for line in found.splitlines()]
    return [row for row in rows if len(row) == len(_COUNTERS.split(","))]


def _read_link_errors() -> Mapping[tuple[str, str, str], int]:
    """Card, link and kind of error (CRC, replay, recovery), each with its count since the driver was loaded."""
    card, found = "", {}
    for line in program_output("nvidia-smi", "nvlink", "-e", timeout=DRIVER_TIMEOUT).splitlines():
        if heading := _GPU_LINE.match(line):
            card = heading[1]
        elif row := _LINK_LINE.match(line):
            found[card, row[1], row[2]] = int(row[3])
    return found
