from __future__ import annotations

from zero2all.base.findings import Finding, finding_if, page_finding


def test_a_finding_in_a_terminal_has_its_remedy_on_a_line_of_its_own() -> None:
    assert str(Finding("bad", "disk", "full", "remove old runs")) == "BAD  disk: full\n     remove old runs"
    assert str(Finding("good", "disk", "90GB free")) == "ok   disk: 90GB free"


def test_the_page_gets_reason_and_remedy_in_both_languages() -> None:
    shown = page_finding(Finding("note", "spike", "2 steps", "see step 7", 7, "两步"))
    assert vars(shown) == {
        "rule": "spike", "level": "note", "text": "2 steps; see step 7", "text_zh": "两步", "step": 7,
    }  # fmt: skip
    assert page_finding(Finding("bad", "check failed", "no file")).text_zh == "no file"


def test_only_what_is_wrong_has_a_remedy() -> None:
    said = {"what": "files", "why": "10 open", "remedy": "raise it"}
    assert finding_if(wrong=True, level="bad", **said) == Finding("bad", "files", "10 open", "raise it")
    assert finding_if(wrong=False, level="bad", **said) == Finding("good", "files", "10 open")
