"""Commands that README and SECURITY name as proof of what they say: the gate runs each of them in small."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROOFS = {
    ("README.md", "z2a bench parity"): "bench/test_parity.py::test_the_command_compares_the_layouts_that_it_is_given",
    ("README.md", "chaos suite"): "chaos/test_chaos.py::test_a_job_survives_the_short_suite",
    ("README.md", "z2a parallel show"): "parallel/test_dry_run.py::test_the_command_shows_the_shards_of_every_rank",
    (
        "README.md",
        "z2a export",
    ): "cli/test_cli.py::test_quickstart_from_messy_files_to_samples_and_every_command_after_it",
    ("README.md", "llama.cpp"): "export/test_gguf.py::test_a_run_is_exported_compared_and_described",
    ("README.md", "z2a plan"): "planner/test_plan_command.py::test_a_recipe_is_planned_without_any_corpus",
    ("README.md", "z2a compare"): "experiments/test_commands.py::"
    "test_one_recipe_twice_is_no_difference_and_an_eighth_of_the_rate_is_one",
    ("README.md", "z2a blame"): "train/test_blame.py::test_losses_of_documents_add_up_to_the_loss_of_the_step",
    # Its cases are tests, and the gate runs those that are not marked long. The program only counts them.
    ("SECURITY.md", "python -m tests.adversarial"): "adversarial/test_families.py::test_the_table_adds_up",
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
