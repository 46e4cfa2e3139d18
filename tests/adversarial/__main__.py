"""The whole attack: every hostile case, also those of the other packages and the long ones.

python -m tests.adversarial                         # options are pytest's
python -m tests.adversarial -m 'not long' -n 2      # those of the gate
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PATTERNS = (
    "adversarial/test_*.py", "sandbox/test_*.py", "**/test_*hostile*.py", "**/test_damage.py", "**/test_kill.py",
    "checkpoint/test_foreign_checkpoints.py", "checkpoint/test_replica_server.py", "corpus/test_document_files.py",
    "corpus/test_fetch*.py", "corpus/test_readers.py", "corpus/test_resume.py", "corpus/test_s3.py",
    "cluster/test_job_files.py", "cluster/launch/test_rendezvous.py", "recipe/test_imported_code.py",
    "generation/serve/test_page.py", "generation/serve/test_schema.py", "test_disk_full.py", "base/test_redact.py",
    "test_supply_chain.py", "test_workflow.py", "tokenizer/test_safety.py", "tokenizer/test_training.py",
    "track/test_flood.py", "track/test_page.py", "track/test_server.py", "track/test_sinks.py",
)  # fmt: skip


def main() -> None:
    found: set[Path] = set()
    for pattern in PATTERNS:
        files = set(TESTS.glob(pattern))
        if not files:
            sys.exit(f"no test is called {pattern}: correct PATTERNS in {__file__}")
        found |= files
    options = sys.argv[1:] if any(word.startswith("-m") for word in sys.argv[1:]) else ["-m", "", *sys.argv[1:]]
    sys.exit(pytest.main(["-q", "--timeout=900", *options, *map(str, sorted(found))]))


if __name__ == "__main__":
    main()
