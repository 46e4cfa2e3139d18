"""What counts as code by its name: one answer for readers, filters and deduplication."""

from __future__ import annotations

import re

PROGRAMS = frozenset({
    ".py", ".pyi", ".pyx", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt",
    ".scala", ".js", ".jsx", ".ts", ".tsx", ".mjs", ".cjs", ".vue", ".css", ".scss", ".rb", ".php", ".pl", ".cs", ".fs",
    ".swift", ".sh", ".bash", ".zsh", ".ps1", ".bat", ".sql", ".lua", ".jl", ".r", ".hs", ".ml", ".proto", ".thrift",
    ".m", ".mm", ".dart", ".ex", ".exs", ".erl", ".clj", ".f90", ".zig", ".asm", ".s", ".v", ".sv", ".vhd", ".cmake",
    ".mk", ".gradle", ".tf",
})  # fmt: skip
# Not read as text of their own, but where a record says that it is such a file, every space of it counts too.
SETTINGS = frozenset({".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".xml", ".ipynb", ".dockerfile", ".makefile"})
WITHOUT_ENDING = frozenset({"Makefile", "Dockerfile", "CMakeLists.txt"})
PATH_FIELDS = ("path", "file", "file_path", "filename", "file_name", "max_stars_repo_path")

_PATH_FIELD = re.compile(rf'"(?:{"|".join(PATH_FIELDS)})": "([^"]{{1,1000}})"')
_PROGRAM_NAMED_LIKE_FILE = re.compile(r"^[\w.-]+\.(?:js|vue|go|net)$", re.IGNORECASE)  # Node.js is an article


def is_code_path(path: str) -> bool:
    """By the ending in small letters: U.S is a country, not assembly language."""
    name = path.replace("\\", "/").rpartition("/")[2]
    _, dot, ending = name.rpartition(".")
    return dot + ending in PROGRAMS or dot + ending in SETTINGS or name in WITHOUT_ENDING


def is_filed_as_code(category: str, title: str, others: str) -> bool:
    """Whether a document's labels say that it is code: its category, its title, or a path in ``others``."""
    category = category.lower()
    if category == "code" or category.startswith(("code/", "source code")):
        return True
    if is_code_path(title) and not _PROGRAM_NAMED_LIKE_FILE.match(title):
        return True
    path = _PATH_FIELD.search(others) if others else None
    return bool(path and is_code_path(path.group(1)))
