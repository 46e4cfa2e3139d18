"""What a corpus build prints for each source: what was kept, and what was not, with the reason and the files."""

from __future__ import annotations

from collections.abc import Mapping

from zero2all.corpus.manifest import BuiltCorpus, SkippedBySource, SkippedFiles
from zero2all.corpus.readers import MISSING_REASONS
from zero2all.units import show_bytes

MAX_REASONS = 4  # for each source; the manifest has all
MAX_NAMES = 3  # of files, for each reason


def summary_lines(corpus: BuiltCorpus) -> list[str]:
    """A line for each source, and one more for what was skipped or dropped of it."""
    lines = []
    for source, train_part in corpus.splits["train"].items():
        valid_part = corpus.splits["valid"][source]
        lines.append(
            f"{source}: {count_text(train_part.documents, 'document')}, {show_bytes(train_part.bytes)}; "
            f"validation {valid_part.documents}, {show_bytes(valid_part.bytes)}"
        )
        dropped = {reason: part.documents for reason, part in corpus.sources[source].dropped.items()}
        if reasons := reasons_text(corpus.left_out[source], dropped):
            lines.append(f"  skipped: {reasons}")
    return lines


def reasons_text(skipped: SkippedBySource, dropped: Mapping[str, int]) -> str:
    """Why records, files and documents of a source are not in the corpus: first what an installation would change, then
    the most frequent reasons.

    ``dropped`` counts documents by reason. Empty if everything is in the corpus.
    """
    counted = [
        (count, "record", reason, skipped.record_files.get(reason)) for reason, count in skipped.documents.items()
    ]
    counted += [(files.count, "file", reason, files) for reason, files in skipped.files.items()]
    counted += [(count, "document", reason, None) for reason, count in dropped.items()]
    counted.sort(key=lambda one: (one[2] not in MISSING_REASONS, -one[0]))
    texts = [
        f"{count_text(count, what)} ({reason}{_names_text(files)})"
        for count, what, reason, files in counted[:MAX_REASONS]
    ]
    if len(counted) > MAX_REASONS:
        texts.append("and more in documents/manifest.json")
    advice = any(what == "file" and reason.startswith("format ") for _, what, reason, _ in counted)
    return ", ".join(texts) + ("; convert files of such a format to text first" if advice else "")


def count_text(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _names_text(files: SkippedFiles | None) -> str:
    if files is None or not files.first:
        return ""
    more = ", ..." if files.count > MAX_NAMES else ""
    return f": {', '.join(files.first[:MAX_NAMES])}{more}"
