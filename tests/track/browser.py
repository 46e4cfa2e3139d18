"""A real Chromium without a window, where it and its driver are installed; and a server to point it at."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


@contextmanager
def browser(
    profile: Path, width: int = 1400, height: int = 1000, phone: bool = False, flags: Sequence[str] = ()
) -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian: chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, *flags, f"--window-size={width},{height}", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    if phone:
        metrics = {"width": width, "height": height, "pixelRatio": 2.0, "touch": True}
        options.add_experimental_option("mobileEmulation", {"deviceMetrics": metrics})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield started
    finally:
        started.quit()


@contextmanager
def cleaned(opened: Any) -> Iterator[Any]:
    """A browser that several tests share: nothing that a page has stored or said is left for the next."""
    opened.set_window_size(1400, 1000)
    yield opened
    opened.execute_script("try { sessionStorage.clear() } catch {}")  # an empty page has none
    opened.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": "*", "storageTypes": "all"})
    opened.get("about:blank")
    opened.get_log("browser")


def complaints(page: Any) -> list[dict[str, Any]]:
    return [line for line in page.get_log("browser") if line["level"] == "SEVERE"]


@contextmanager
def watching(*words: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``z2a watch`` as a process of its own: the address of its page, and the process."""
    program = [sys.executable, "-c", "from zero2all.cli.main import main; main()", "watch", *map(str, words)]
    process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"http://\S+", line):
                yield found[0], process
                break
        else:
            pytest.fail(f"z2a watch ended with {process.wait(30)}")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
