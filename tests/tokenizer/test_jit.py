from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from zero2all.tokenizer.jit import remove_stale_cache


def test_a_compiled_cache_of_another_version_is_removed(tmp_path: Path) -> None:
    """numba would unpickle it, and fail on a class that was renamed since."""
    source, cache = tmp_path / "word_table.py", tmp_path / "__pycache__"
    cache.mkdir()
    for path, seconds in ((cache / "stale.nbi", 100), (source, 200), (cache / "current.nbi", 300)):
        path.touch()
        os.utime(path, (seconds, seconds))
    remove_stale_cache(tmp_path)
    assert [path.name for path in cache.iterdir()] == ["current.nbi"]


def test_only_training_imports_numba() -> None:
    script = """
import sys
from zero2all.tokenizer import Tokenizer
assert "numba" not in sys.modules
from zero2all.tokenizer import train_tokenizer
assert "numba" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
