"""The one schema of a document, and what counts as code by its name, for readers, filters and deduplication."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

SCHEMA = pa.schema(
    [
        ("gid", pa.string()),
        ("id", pa.string()),
        ("data_src", pa.string()),
        ("category", pa.string()),
        ("title", pa.string()),
        ("content", pa.string()),
        ("desc", pa.string()),
        ("others", pa.string()),  # JSON: the record's fields beyond those above
    ]
)
"""The Arrow schema of the Parquet files of a corpus."""


@dataclass(frozen=True)
class Document:
    """One document of a corpus, a row of its Parquet files."""

    gid: str
    id: str
    data_src: str
    category: str
    title: str
    content: str
    desc: str
    others: str


def gid_maker(data_src: str) -> Callable[[bytes, bytes], str]:
    """Gids of the documents of one source: of a record's own id, if it has one, and its content.

    128 bits over all three, whatever the order of arrival. 64 bits would collide at some 10^10 documents.
    """
    source = data_src.encode()
    begun = hashlib.blake2b(len(source).to_bytes(8, "little") + source, digest_size=16)

    def gid(own_id: bytes, content: bytes) -> str:
        digest = begun.copy()
        digest.update(len(own_id).to_bytes(8, "little") + own_id + len(content).to_bytes(8, "little"))
        digest.update(content)
        return digest.hexdigest()

    return gid


def is_validation(gid: str, holdout: float) -> bool:
    """Decide by the document itself, so that growing a corpus never moves a document across the split."""
    return gid_position(gid) < holdout


def gid_position(gid: str) -> float:
    """The first 48 bits of a gid as a number from 0 to 1; it decides on which side of the split a document is."""
    return int(gid[:12], 16) / 2**48


def is_taken(gid: str, share: float) -> bool:
    """Whether a document is in a share of its source. By other bits of the gid than those that decide on the split."""
    return int(gid[12:24], 16) / 2**48 < share


def gid_in_split(text: str, *, valid: bool, holdout: float) -> str:
    """A gid for part of a document: a hash of ``text`` with its position on the given side of the split."""
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    limit = min(math.ceil(holdout * 2**48), 2**48 - 1)
    first, size = (0, limit) if valid else (limit, 2**48 - limit)
    return f"{first + int(digest[:12], 16) % size:012x}{digest[12:]}"


def replace_lone_surrogates(text: str) -> str:
    """JSON may contain lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


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
    """Decide by the lowercase extension: U.S is a country, not assembly language."""
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
