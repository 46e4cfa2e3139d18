"""Benchmarks on local files: accuracy, bits-per-byte of the right answer, and mutations that show memorization."""

from zero2all.evals.bench.items import Form
from zero2all.evals.bench.report import BenchReport, BenchResult, Difference, Estimate, format_report
from zero2all.evals.bench.run import BenchOptions, run_bench
from zero2all.evals.bench.tasks import Task, find_tasks, read_tasks

__all__ = [
    "BenchOptions",
    "BenchReport",
    "BenchResult",
    "Difference",
    "Estimate",
    "Form",
    "Task",
    "find_tasks",
    "format_report",
    "read_tasks",
    "run_bench",
]
