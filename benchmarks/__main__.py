"""Run a benchmark: ``python -m benchmarks NAME``. Without a name, list them."""

from __future__ import annotations

import ast
import importlib
import sys
from difflib import get_close_matches
from pathlib import Path

DIRECTORY = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """The first line of every benchmark by its name, read without its imports."""
    found = {}
    for path in sorted(DIRECTORY.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        is_benchmark = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
        if is_benchmark and path.stem != "__main__":
            found[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found


def main() -> None:
    names = benchmarks()
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        width = max(map(len, names))
        lines = [f"{name:<{width}}  {line}\n" for name, line in names.items()]
        sys.stdout.write("".join(["python -m benchmarks NAME [--help]\n\n", *lines]))
        return
    name = sys.argv[1]
    if name not in names:
        close = get_close_matches(name, names)
        sys.exit(
            f"no benchmark {name}{f': did you mean {close[0]}?' if close else ''}; 'python -m benchmarks' lists all"
        )
    sys.argv = [f"python -m benchmarks {name}", *sys.argv[2:]]
    importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
