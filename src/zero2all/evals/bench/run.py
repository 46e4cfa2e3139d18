"""``z2a eval bench``: evaluate targets on benchmarks, their forms and their mutations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zero2all.base.console import say
from zero2all.base.errors import UsageError
from zero2all.base.plugins import PluginSpec
from zero2all.evals.bench.evaluate import ModelScorer, Scorer, evaluate_task
from zero2all.evals.bench.items import CodeItem, Form
from zero2all.evals.bench.memorization import (
    CLEAN,
    MUTATIONS,
    Contamination,
    find_contamination_of,
    mutate,
    train_on_questions,
)
from zero2all.evals.bench.report import ORIGINAL, BenchEvaluation, BenchReport, Difference, compare, core, summarize
from zero2all.evals.bench.tasks import Task, read_tasks
from zero2all.evals.target import EvalTarget
from zero2all.sandbox import Sandbox, open_sandbox
from zero2all.train import Run

UNKNOWN_DATA = "{} may have been trained on these questions: --mutate shows signs of it"
UNTESTED = "{}: {}: {} answers were not tested and count as wrong, since they pass more than plain data: {}"
GENERATED = "generate"  # in place of a form, where nothing is chosen
QUESTION_TRAINED = "after question training"
SEED = 0  # of the items that --limit chooses, and of the changes of --mutate


@dataclass(frozen=True)
class BenchOptions:
    """How benchmarks are asked."""

    forms: tuple[Form, ...] = ()
    """The forms of multiple-choice questions. Default: the task's, with mutations ``letter``."""
    shots: int | None = None
    """Number of examples in a prompt. Default: the task's."""
    limit: int | None = None
    """Number of items of a task, chosen at random but always the same. Default: all."""
    mutate: bool = False
    """Evaluate every mutation of multiple-choice questions too."""
    train_on_questions: bool = False
    """Evaluate multiple-choice questions also after training on them, without their answers."""
    contamination: bool = False
    """Compare items with the training documents of the run, and evaluate those that are in none by themselves."""
    unsafe_code: bool = False
    """Run generated code without a sandbox where there is none."""


DEFAULT_OPTIONS = BenchOptions()


def run_bench(
    targets: Sequence[EvalTarget],
    data: Path,
    names: Sequence[PluginSpec] = (),
    options: BenchOptions = DEFAULT_OPTIONS,
    make_scorer: Callable[[EvalTarget], Scorer] = ModelScorer,
) -> BenchReport:
    """Evaluate targets on the benchmarks in a directory of files, or on those named.

    >>> report = run_bench([open_target("runs/first")], Path("eval"), ["arc_easy", "cmmlu"])
    >>> print(format_report(report))
    """
    tasks = [_prepared(task, options) for task in read_tasks(data, names)]
    sandbox = None
    if any(isinstance(item, CodeItem) for task in tasks for item in task.items):
        sandbox = open_sandbox(unsafe=options.unsafe_code)
        say(f"generated code runs in {sandbox.backend}" if sandbox.backend != "none" else "code runs without a sandbox")
    contamination = _contamination(targets, tasks) if options.contamination else {}
    evaluations = [
        evaluation
        for target in targets
        for task in tasks
        for evaluation in _evaluations(make_scorer, target, task, options, sandbox)
    ]
    evaluations += [
        clean
        for one in evaluations
        if one.task in contamination and one.mutation == ORIGINAL
        if (clean := _clean_part(one, contamination[one.task])) is not None
    ]
    cores = {
        label: estimate
        for label in dict.fromkeys(evaluation.target for evaluation in evaluations)
        if (estimate := core(_first_of_tasks(evaluations, label))) is not None
    }
    # What a run was trained on is known; what a Hugging Face model was trained on is not.
    notes = [] if options.mutate else [UNKNOWN_DATA.format(target.name) for target in targets if target.step is None]
    for one in evaluations:
        if unsupported := [item.id for item in one.items if item.is_unsupported]:
            notes.append(UNTESTED.format(one.target, one.task, len(unsupported), ", ".join(unsupported[:5])))
    results = [summarize(one) for one in evaluations]
    return BenchReport(results, _differences(evaluations), cores, list(contamination.values()), notes)


def _prepared(task: Task, options: BenchOptions) -> Task:
    return task.with_shots(_shots(task, options)).sample(options.limit, SEED)


def _shots(task: Task, options: BenchOptions) -> int:
    return 0 if task.shots is None else task.shots if options.shots is None else options.shots


def _evaluations(
    make_scorer: Callable[[EvalTarget], Scorer],
    target: EvalTarget,
    task: Task,
    options: BenchOptions,
    sandbox: Sandbox | None,
) -> Iterator[BenchEvaluation]:
    forms: tuple[Form | None, ...] = (None,)
    if task.form is not None:
        forms = options.forms or (("letter",) if options.mutate else (task.form,))
    label = target.name if target.step is None else f"{target.name} step {target.step}"
    shots, scorer = _shots(task, options), make_scorer(target)
    for form in forms:
        for version, versioned in _versions(task, form, options):
            say(f"{label}: {task.name}, {form or GENERATED}, {version}: {len(versioned.items)} items")
            items = evaluate_task(scorer, versioned, form, shots, sandbox)
            yield BenchEvaluation(label, task.name, form or GENERATED, shots, version, items)
        if options.train_on_questions and form is not None:
            say(f"{label}: {task.name}, {form}, {QUESTION_TRAINED}")
            trained = make_scorer(train_on_questions(target, task, form))
            items = evaluate_task(trained, task, form, shots, sandbox)
            yield BenchEvaluation(label, task.name, form, shots, QUESTION_TRAINED, items)


def _contamination(targets: Sequence[EvalTarget], tasks: list[Task]) -> dict[str, Contamination]:
    """Contamination by task, over the training documents of the first target."""
    target = targets[0]
    if target.step is None:
        raise UsageError(
            f"--contamination: the training documents of {target.name} are unknown; --mutate shows what it memorized"
        )
    return {one.task: one for one in find_contamination_of(tasks, Run.open(target.directory).recipe.documents_dir)}


def _clean_part(evaluation: BenchEvaluation, contamination: Contamination) -> BenchEvaluation | None:
    """The results on items that are in no training document; None if those are all items, or none."""
    items = [item for item in evaluation.items if contamination.is_clean(item.id)]
    return replace(evaluation, mutation=CLEAN, items=items) if 0 < len(items) < len(evaluation.items) else None


def _versions(task: Task, form: Form | None, options: BenchOptions) -> Iterator[tuple[str, Task]]:
    yield ORIGINAL, task
    for mutation in MUTATIONS if options.mutate and form is not None else ():
        mutated = mutate(task, mutation, SEED)
        if mutated is not None and (form != "cloze" or mutation.changes_cloze):
            yield mutation.name, mutated


def _first_of_tasks(evaluations: Sequence[BenchEvaluation], target: str) -> list[BenchEvaluation]:
    """One evaluation of each task: in the first form."""
    found: dict[str, BenchEvaluation] = {}
    for evaluation in evaluations:
        if evaluation.target == target:
            found.setdefault(evaluation.task, evaluation)
    return list(found.values())


def _differences(evaluations: Sequence[BenchEvaluation]) -> list[Difference]:
    """Compare each mutation with the original, other forms with the first, and other targets with the first."""
    found: list[Difference] = []
    by_key = {(one.target, one.task, one.form, one.mutation): one for one in evaluations}
    first_target = evaluations[0].target
    for one in evaluations:
        first_form = next(other.form for other in evaluations if other.task == one.task)
        if one.mutation == CLEAN:  # the same answers
            continue
        if one.mutation != ORIGINAL:
            original = by_key[one.target, one.task, one.form, ORIGINAL]
            # Centered: the generative question, and one with fewer options, have another chance of being right.
            found += compare(original, one, (ORIGINAL, one.mutation), ("centered_accuracy",))
        elif one.form != first_form:
            found += compare(
                by_key[one.target, one.task, first_form, ORIGINAL], one, (first_form, one.form), ("accuracy",)
            )
        if one.target != first_target:
            reference = by_key[first_target, one.task, one.form, one.mutation]
            found += compare(reference, one, (first_target, one.target), ("accuracy", "answer_bits_per_byte"))
    return found
