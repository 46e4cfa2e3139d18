"""What counts as code by its name: one answer for readers, filters and deduplication."""

from __future__ import annotations

import re

CODE_EXTENSIONS = frozenset({
    ".py", ".pyi", ".pyx", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt",
    ".scala", ".js", ".jsx", ".ts", ".tsx", ".mjs", ".cjs", ".vue", ".css", ".scss", ".rb", ".php", ".pl", ".cs", ".fs",
    ".swift", ".sh", ".bash", ".zsh", ".ps1", ".bat", ".sql", ".lua", ".jl", ".r", ".hs", ".ml", ".proto", ".thrift",
    ".m", ".mm", ".dart", ".ex", ".exs", ".erl", ".clj", ".f90", ".zig", ".asm", ".s", ".v", ".sv", ".vhd", ".cmake",
    ".mk", ".gradle", ".tf",
})  # fmt: skip
# Not read as text of their own, but where a record is labeled as such a file, whitespace is significant too.
CONFIG_EXTENSIONS = frozenset(
    {".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".xml", ".ipynb", ".dockerfile", ".makefile"}
)
CODE_FILE_NAMES = frozenset({"Makefile", "Dockerfile", "CMakeLists.txt"})
PATH_FIELDS = ("path", "file", "file_path", "filename", "file_name", "max_stars_repo_path")

_PATH_FIELD = re.compile(rf'"(?:{"|".join(PATH_FIELDS)})": "([^"]{{1,1000}})"')
_PRODUCT_NAME = re.compile(r"^[\w.-]+\.(?:js|vue|go|net)$", re.IGNORECASE)  # Node.js is an article


def is_code_path(path: str) -> bool:
    """By the lowercase extension: U.S is a country, not assembly language."""
    name = path.replace("\\", "/").rpartition("/")[2]
    _, dot, ending = name.rpartition(".")
    return dot + ending in CODE_EXTENSIONS or dot + ending in CONFIG_EXTENSIONS or name in CODE_FILE_NAMES


def is_labeled_as_code(category: str, title: str, others: str) -> bool:
    """Whether a document is labeled as code: its category, its title, or a path in ``others``."""
    category = category.lower()
    if category == "code" or category.startswith(("code/", "source code")):
        return True
    if is_code_path(title) and not _PRODUCT_NAME.match(title):
        return True
    path = _PATH_FIELD.search(others) if others else None
    return bool(path and is_code_path(path.group(1)))
