"""Start a command that runs until Ctrl-C, wait until it answers, interrupt it: ``interrupted.py COMMAND...``.

It answers when a request to the address that it prints succeeds, or, without an address, when it prints.

Nothing but the standard library, because it runs in whatever venv the command is in.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

SECONDS = 60


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=SECONDS):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def main() -> int:
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    printed = process.stdout.readline()
    sys.stdout.buffer.write(printed)
    sys.stdout.flush()
    address = re.search(rb"http://\S+", printed)
    until = time.monotonic() + SECONDS
    while address and process.poll() is None and time.monotonic() < until and not answers(address[0].decode()):
        time.sleep(0.1)
    if printed:
        process.send_signal(signal.SIGINT)
    sys.stdout.buffer.write(process.communicate(timeout=120)[0])
    return 0 if printed and process.returncode in (0, 130, -signal.SIGINT) else process.returncode or 1


if __name__ == "__main__":
    sys.exit(main())
