"""Experiments: train and evaluate variants of a recipe within a budget, and compare them.

>>> plan = plan_sweep(Path("my.yaml"), ["train.optimizer.lr=1e-3,2e-3,4e-3"], seeds=2)
>>> run_experiment(plan, budget="5m")
>>> print(report_text(build_report(open_experiment(plan.directory))))

A plan is a list of variants, each a recipe with overrides and a seed: ``make_plan`` makes one of any groups. There is
one runner for all plans.
"""

from zero2all.experiments.comparison import Comparison, compare_targets, open_experiment
from zero2all.experiments.ladder import ladder_report, ladder_text, plan_ladder, size_recipe
from zero2all.experiments.mixtures import plan_mixtures, write_suggestion
from zero2all.experiments.report import Report, build_report, report_text
from zero2all.experiments.runner import run_experiment
from zero2all.experiments.variants import ExperimentPlan, Variant, VariantGroup, make_plan, plan_comparison, plan_sweep

__all__ = [
    "Comparison",
    "ExperimentPlan",
    "Report",
    "Variant",
    "VariantGroup",
    "build_report",
    "compare_targets",
    "ladder_report",
    "ladder_text",
    "make_plan",
    "open_experiment",
    "plan_comparison",
    "plan_ladder",
    "plan_mixtures",
    "plan_sweep",
    "report_text",
    "run_experiment",
    "size_recipe",
    "write_suggestion",
]
