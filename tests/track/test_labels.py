"""Every label on the page is in words, and the Chinese page has no English one: all that code can emit is looked up."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import zero2all
from zero2all.track.health_checks import MESSAGES
from zero2all.track.run_view import END_EVENTS
from zero2all.train.objectives.preference import KTO_METRICS, PAIR_METRICS
from zero2all.train.step_timer import PARTS
from zero2all.train.throughput import UTILIZATION

PACKAGE = Path(zero2all.__file__).parent
WEB = Path(__file__).parents[2] / "web" / "src"
# What the page shows as it is: the same in Chinese, or names that come from the user.
SAME = {"checkpoint", "tok/s", "rank {}"}
COUNTS = {"answers", "pairs", "chosen", "rejected"}  # sums that means are divided by
KEPT_OUT = {"tokens", *PARTS} - {"loss"}  # an axis; parts of a step before they are named time/…


def javascript_strings(file: str, table: str) -> dict[str, str]:
    """An object literal of strings, in a file of the page."""
    text = (WEB / file).read_text(encoding="utf-8")
    body = text[text.index(f"const {table} = {{") :]
    body = body[: body.index("\n};")]
    return {a or b: c for a, b, c in re.findall(r'(?:"([^"]+)"|\b(\w+)): "([^"]*)"', body)}


TITLES, LABELS = javascript_strings("groups.js", "TITLES"), javascript_strings("groups.js", "LABELS")
ZH = javascript_strings("words.js", "ZH")


def trees(*places: str) -> Iterator[ast.AST]:
    for place in places:
        path = PACKAGE / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield ast.parse(file.read_text(encoding="utf-8"))


def constant(node: ast.AST | None) -> str | None:
    """A string; a part that is formatted into it becomes 0."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "0" for part in node.values]
        return "".join(map(str, parts))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def metric_names() -> set[str]:
    """Keys of dictionaries in functions of metrics, what the record gets by name, and the lists of the objectives."""
    names: set[str] = {*PAIR_METRICS, *KTO_METRICS, *UTILIZATION, *(f"time/{part}" for part in PARTS)} - COUNTS
    names |= {f"valid/{name}" for name in names & {*PAIR_METRICS, *KTO_METRICS}} | {"valid/reward"}
    for tree in trees("train", "track/system_metrics.py"):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and re.search(
                r"metrics|^record$|^read_result$|reserved_memory", node.name
            ):
                names |= _keys(node)
            elif isinstance(node, ast.Dict):  # metrics of a family, wherever they are made
                names |= {key for key in _keys(node) if re.match(r"(islands|stories|system)/", key)}
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("record.step"):
                names |= {keyword.arg for keyword in node.keywords if keyword.arg}
    names |= {name for tree in trees("track/system_metrics.py") for name in _keys(tree)}
    return {name for name in names if not name.endswith("/0")} - KEPT_OUT


def _keys(tree: ast.AST) -> set[str]:
    found: set[str | None] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            found |= {constant(key) for key in node.keys}
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            found.add(constant(node.slice))
    return {name for name in found if name is not None}


def calls(names: tuple[str, ...], *places: str) -> set[str]:
    """The first argument of every call of these functions, where it is a string."""
    nodes = [node for tree in trees(*places) for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    found = {constant(node.args[0]) for node in nodes if ast.unparse(node.func).rpartition(".")[2] in names}
    return {name for name in found if name}


def chart_of(name: str) -> str:
    """As ``chartOf`` in groups.js."""
    if name in UTILIZATION:
        return "utilization/*"
    if re.match(r"gpu\d+/", name):
        return re.sub(r"^gpu\d+", "gpu*", name)
    return name if "/" not in name or re.match(r"(system|islands)/", name) else name.partition("/")[0] + "/*"


def test_the_names_are_found() -> None:
    """A change of the code that hides names from this test is noticed here."""
    assert metric_names() >= {
        "loss", "lr", "grad_norm", "mfu", "memory", "memory_reserved", "data_wait", "checkpoint_stall", "sync_bytes",
        "step_time", "reward", "truncated_answers", "sampler_gap", "kl", "rewards/chosen", "stories/right sums",
        "islands/wait", "system/load", "gpu0/watts", "time/forward", "tokens_per_second", "tflops",
    }  # fmt: skip
    assert len(ZH) > 150
    assert len(TITLES) > 30


def test_every_metric_has_a_title_in_words() -> None:
    missing = {name for name in metric_names() if chart_of(name) not in TITLES}
    assert not missing, f"without a title in groups.js: {sorted(missing)}"
    assert not [title for title in TITLES.values() if "_" in title.replace("max_answer_tokens", "")]


def test_every_line_of_a_chart_has_a_label_in_both_languages() -> None:
    lines = {name for name in metric_names() if chart_of(name).endswith("/*") and not name.startswith("gpu")}
    shown = {LABELS.get(name, name.partition("/")[2]) for name in lines} | {"all", "test set", "source"}
    assert not {label for label in shown if "_" in label or "/" in label}, "not in words"
    assert not shown - set(ZH), f"not in words.js: {sorted(shown - set(ZH))}"


def test_titles_labels_events_and_findings_are_translated() -> None:
    rules = {key.partition(":")[0].partition(" ")[2] for key in MESSAGES}
    events = calls(("event", "on_event"), "train", "track", "cluster") | set(END_EVENTS)
    histograms = {"gradient norm by layer", "prompt"}
    words = {*TITLES.values(), *LABELS.values(), *rules, *events, *histograms}
    missing = {word for word in words if word not in ZH}
    assert not missing, f"not in words.js: {sorted(missing)}"
    english = {word: text for word, text in ZH.items() if re.fullmatch(r"[\x00-\x7f]*", text) and word not in SAME}
    assert not {word: text for word, text in english.items() if re.search(r"[a-z]{3}", text)}


def test_what_the_page_says_itself_is_translated() -> None:
    said: set[str] = set()
    for path in sorted(WEB.glob("*.js")):
        text = path.read_text(encoding="utf-8")
        said |= set(re.findall(r'\bsay\("([^"]+)"\)', text)) | set(re.findall(r'\bsay\([^"()]*\? "([^"]+)"', text))
    assert len(said) > 30
    assert not said - set(ZH), f"not in words.js: {sorted(said - set(ZH))}"
