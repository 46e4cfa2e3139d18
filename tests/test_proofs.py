"""Commands that README, status and SECURITY name as proof of what they say: the gate runs each of them in small."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROOFS = {
    ("README.md", "every command"): "cli/test_cli.py::"
    "test_quickstart_from_messy_files_to_samples_and_every_command_after_it",
    ("README.md", "python -m tests.chaos"): "chaos/test_chaos.py::test_a_job_survives_the_short_suite",
    ("README.md", "z2a bench parity"): "bench/test_parity.py::test_the_command_compares_the_layouts_that_it_is_given",
    ("README.md", "z2a blame"): "train/test_blame.py::test_losses_of_documents_add_up_to_the_loss_of_the_step",
    ("docs/evidence/status.md", "python -m tests.oracle"): "oracle/test_oracle.py::test_every_layout",
    ("docs/evidence/status.md", "z2a export"): "export/test_gguf.py::test_a_run_is_exported_compared_and_described",
    (
        "docs/evidence/status.md",
        "test_published.py",
    ): "planner/test_published.py::test_llama_2_7b_took_184320_gpu_hours",
    # Its cases are tests, and the gate runs those that are not marked long.
    ("SECURITY.md", "python -m tests.adversarial"): "adversarial/test_network.py::"
    "test_noise_gets_no_answer_and_leaves_no_trace",
    ("SECURITY.md", "python -m tests.adversarial.fuzz"): "adversarial/test_fuzz.py::"
    "test_no_input_of_a_few_seconds_is_a_finding",
    ("SECURITY.md", "python -m tests.adversarial.pattern_attack"): "adversarial/test_patterns.py::"
    "test_patterns_take_linear_time",
}


@pytest.mark.parametrize(("page", "command"), PROOFS)
def test_the_gate_runs_each_proof(page: str, command: str) -> None:
    assert command in (ROOT / page).read_text(encoding="utf-8")
    path, _, name = PROOFS[page, command].partition("::")
    module = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    [test] = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name]
    marks = [ast.unparse(decorator) for decorator in test.decorator_list]
    assert "pytest.mark.long" not in marks


def test_every_claim_of_the_readme_has_a_proof_that_the_gate_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    claims = re.findall(r"^\d\. \*\*.*?(?=^\d\. |^#)", readme, re.MULTILINE | re.DOTALL)
    assert len(claims) == readme.count("*Proof:*") > 0
    for claim in claims:
        assert any(page == "README.md" and command in claim for page, command in PROOFS), claim
