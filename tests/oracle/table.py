"""The table: objectives, templates and layouts. A new one of any of them is one row here or in ``templates``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from torch import Tensor

from tests.oracle import reference
from tests.oracle.product import ObservedStep, merge, observe, observe_all
from tests.oracle.reference import Models, Placed, Reference, TransformersModel, TransformersTokenizer, hf_name
from tests.oracle.rollouts import serve_answers
from tests.oracle.templates import TEMPLATES, Template
from tests.oracle.workspace import Workspace
from zero2all.bench.rank_harness import stream_jobs
from zero2all.recipe import Recipe

LOGP_TOLERANCE = 1e-5  # of the log-probability of an answer, in fp32
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 2e-5  # relative to the norm of a parameter's gradient
CELLS_PER_START = 21  # of ranks: torch 2.13 has been seen to crash after dozens of process groups
SECONDS = 1200.0


@dataclass(frozen=True)
class Layout:
    name: str
    ranks: int = 2
    settings: tuple[str, ...] = ()


ONE_PROCESS = "one process"
LAYOUTS = (
    Layout(ONE_PROCESS, ranks=1),
    Layout("TP 2", settings=("parallel.tp=2",)),
    Layout("PP 2", settings=("parallel.pp=2",)),
    Layout("CP 2 gather", settings=("parallel.cp=2", "parallel.cp_attention=allgather")),
    Layout("CP 2 ring", settings=("parallel.cp=2", "parallel.cp_attention=ring")),
    Layout("CP 2 Ulysses", settings=("parallel.cp=2", "parallel.cp_attention=ulysses")),
)
EVERYWHERE = frozenset(layout.name for layout in LAYOUTS)
WHOLE_ANSWERS = frozenset({ONE_PROCESS, "TP 2", "PP 2"})  # the recipe rejects cp, which splits them
ONE_DEVICE = frozenset({ONE_PROCESS})  # the recipe rejects all three: a position needs all logits

ReadRows = Callable[[ObservedStep, TransformersTokenizer], list[Placed]]


@dataclass(frozen=True)
class Objective:
    """An objective of the product, and the same loss by transformers."""

    name: str
    settings: tuple[str, ...]
    """Of the recipe."""
    rows: ReadRows
    """How its rows are made of sequences."""
    loss: Callable[[Reference], Tensor]
    layouts: frozenset[str] = EVERYWHERE
    recorded_loss: Callable[[Reference], Tensor] | None = None
    """What the product records as the loss, if that is not what it minimizes."""
    by_token: bool = False
    """Whether log-probabilities are compared token by token: it has no answers."""
    gradient_tolerance: float = GRADIENT_TOLERANCE
    has_endpoint: bool = False


def _of(name: str, *settings: str) -> tuple[str, ...]:
    return (f"train.objective.name={name}", *settings)


SECOND_STEP = "train.steps=2"  # in the first, the model is the reference
PAIRS = "train.mixture={preference: 1}"
CHATS = "train.mixture={chat: 1}"
REWARD = "tests.oracle.rollouts:reward_of_text"
GRPO = f"group_size: 3, mask_truncated: false, rewards: ['{REWARD}']"


def _dpo(name: str, options: str, loss: Callable[[Reference], Tensor]) -> Objective:
    settings = _of("dpo", PAIRS, SECOND_STEP, f"train.objective.dpo={{{options}}}")
    return Objective(name, settings, reference.whole_conversations, loss, WHOLE_ANSWERS)


OBJECTIVES = (
    Objective(
        "pretraining", _of("pretrain", "train.mixture={text: 1, chat: 1}"), reference.cut_documents,
        reference.token_loss, by_token=True,
    ),
    Objective("SFT", _of("sft", CHATS), reference.whole_conversations, reference.token_loss),
    _dpo("DPO", "loss: sigmoid", reference.dpo_loss),
    Objective(
        "KTO",
        _of("kto", "train.mixture={preference: 1, rating: 1}", SECOND_STEP,
            "train.objective.kto={desirable_weight: 1.5, undesirable_weight: 0.5}"),
        reference.whole_conversations, reference.kto_loss, WHOLE_ANSWERS,
    ),
    Objective(
        "GRPO", _of("grpo", CHATS, "train.objective.max_answer_tokens=40", f"train.objective.grpo={{{GRPO}}}"),
        reference.sampled_answers, reference.grpo_loss, WHOLE_ANSWERS, has_endpoint=True,
    ),
    Objective(
        "distillation",
        _of("distill", "train.mixture={text: 1, chat: 1}", "train.objective.distill.weight=0.75",
            "train.objective.distill.top_k=16"),
        reference.cut_documents, partial(reference.distillation_loss, weight=0.75, top_k=16, stored=True), ONE_DEVICE,
        recorded_loss=reference.token_loss, by_token=True,
        gradient_tolerance=1e-4,  # what the teacher expects is stored in fp16, where a value may round differently
    ),
    Objective(
        "on-policy distillation",
        _of("distill", CHATS, "train.objective.distill.on_policy=true", "train.objective.distill.weight=0.75",
            "train.objective.max_answer_tokens=24"),
        reference.sampled_answers, partial(reference.distillation_loss, weight=0.75, top_k=32, stored=False),
        ONE_DEVICE, recorded_loss=reference.token_loss,
    ),
)  # fmt: skip
# Their rows and masks are those of DPO: one template in one process shows the loss.
DPO_VARIANTS = (
    _dpo("IPO", "loss: ipo", reference.ipo_loss),
    _dpo("hinge", "loss: hinge", reference.hinge_loss),
    _dpo("robust DPO", "loss: robust, label_smoothing: 0.1", reference.robust_loss),
    _dpo("SimPO", "loss: simpo, beta: 2.0", reference.simpo_loss),
    _dpo("ORPO", "loss: orpo", reference.orpo_loss),
)


@dataclass(frozen=True)
class Cell:
    """One comparison."""

    template: Template
    layout: Layout
    objective: Objective

    def is_at(self, template: Template, layout: Layout) -> bool:
        return (self.template, self.layout) == (template, layout)

    def recipe(self, workspace: Workspace, out: Path, endpoint: str = "") -> Recipe:
        settings = [*self.objective.settings, *self.layout.settings, f"train.init={workspace.model}"]
        if self.objective.name.endswith("distillation"):
            settings.append(f"train.objective.distill.teacher={workspace.teacher}")
        if self.objective.has_endpoint:
            settings.append(f"train.objective.grpo.endpoint={endpoint}")
        return workspace.recipe(self.template.name, out, *settings)


@dataclass(frozen=True)
class Difference:
    """How far the product is from transformers in a cell."""

    cell: Cell
    logp: float
    """Of an answer, or of a token where there are no answers."""
    loss: float
    gradient: float
    problem: str = ""
    """Why nothing could be compared."""

    @property
    def equal(self) -> bool:
        return (
            self.logp <= LOGP_TOLERANCE
            and self.loss <= LOSS_TOLERANCE
            and self.gradient <= self.cell.objective.gradient_tolerance
        )

    def __str__(self) -> str:
        numbers = f"log-probability {self.logp:.1e}, loss {self.loss:.1e}, gradient {self.gradient:.1e}"
        cell = self.cell
        return f"{cell.template.name} x {cell.layout.name} x {cell.objective.name}: {self.problem or numbers}"


def cells(templates: Sequence[Template], layouts: Sequence[Layout], objectives: Sequence[Objective]) -> list[Cell]:
    """Those that the product supports."""
    return [
        Cell(template, layout, objective)
        for layout in layouts
        for template in templates
        for objective in objectives
        if layout.name in objective.layouts
    ]


def measure(workspace: Workspace, selected: Sequence[Cell], out: Path) -> Iterator[Difference]:
    """Each cell by the product and by transformers. Ranks of a layout are started once for many cells."""
    templates = list(dict.fromkeys(cell.template for cell in selected))
    for template in templates:
        workspace.add(template)
    tokenizers = {template: TransformersTokenizer(workspace, template.name) for template in templates}
    models = Models(workspace)
    with ExitStack() as stack:
        endpoints = {key: stack.enter_context(serve_answers(one)) for key, one in tokenizers.items()}
        recipes = [
            cell.recipe(workspace, out / str(number), endpoints[cell.template]) for number, cell in enumerate(selected)
        ]
        for cell, step in _observed(selected, recipes):
            yield compare(cell, step, tokenizers[cell.template], models)


def _observed(selected: Sequence[Cell], recipes: Sequence[Recipe]) -> Iterator[tuple[Cell, ObservedStep]]:
    jobs = list(zip(selected, recipes, strict=True))
    for cell, recipe in jobs:
        if cell.layout.ranks == 1:
            yield cell, observe(recipe)
    for ranks in sorted({cell.layout.ranks for cell in selected} - {1}):
        own = [job for job in jobs if job[0].layout.ranks == ranks]
        for first in range(0, len(own), CELLS_PER_START):
            some = own[first : first + CELLS_PER_START]
            steps = stream_jobs(ranks, observe_all, [recipe for _, recipe in some], seconds=SECONDS, detail=False)
            for (cell, _), seen in zip(some, steps, strict=True):
                yield cell, merge(seen)


def compare(cell: Cell, step: ObservedStep, tokenizer: TransformersTokenizer, models: Models) -> Difference:
    objective = cell.objective
    try:
        placed = objective.rows(step, tokenizer)
    except reference.OracleError as error:
        return Difference(cell, math.inf, math.inf, math.inf, str(error))
    models.trained.load(step.weights)
    given = Reference(placed, step, models.trained, models.initial, models.teacher)
    loss = objective.loss(given)
    loss.backward()  # type: ignore[no-untyped-call]
    recorded = loss if objective.recorded_loss is None else objective.recorded_loss(given)
    return Difference(
        cell,
        max(_logp_differences(given, objective.by_token)),
        abs(recorded.item() - step.loss),
        gradient_difference(step, models.trained),
    )


def _logp_differences(given: Reference, by_token: bool) -> Iterator[float]:
    for one in given.placed:
        theirs, ours = given.model.logps(one.sequence).detach(), -one.losses(given.step.losses)
        if by_token:
            yield from (ours - theirs).abs().tolist()
            continue
        for begin, end in _answers(one.sequence.targets):
            yield abs(float(ours[begin:end].sum() - theirs[begin:end].sum()))


def _answers(targets: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Runs of targets, counted in targets."""
    done = 0
    for run in "".join("x" if target else " " for target in targets).split():
        yield done, done + len(run)
        done += len(run)


def gradient_difference(step: ObservedStep, model: TransformersModel) -> float:
    theirs = dict(model.model.named_parameters())
    if {hf_name(name) for name in step.gradients} != theirs.keys():
        return math.inf
    largest = 0.0
    for name, gradient in step.gradients.items():
        expected = theirs[hf_name(name)].grad
        difference = float((gradient[: len(expected)] - expected).norm() / expected.norm())
        largest = max(largest, difference if math.isfinite(difference) else math.inf)
    return largest


def markdown(differences: Sequence[Difference]) -> str:
    """A line for each template and layout: in each objective the largest differences of log-probability, loss and
    gradient."""
    objectives = list(dict.fromkeys(one.cell.objective.name for one in differences))
    lines = [
        "Largest difference to transformers: log-probability of an answer / loss / gradient, relative to its norm.",
        "",
        f"| template | layout | {' | '.join(objectives)} | equal |",
        "|---" * (3 + len(objectives)) + "|",
    ]
    for template, layout in product(TEMPLATES, LAYOUTS):
        own = {one.cell.objective.name: one for one in differences if one.cell.is_at(template, layout)}
        if own:
            shown = [_shown(own[name]) if name in own else "-" for name in objectives]
            equal = "yes" if all(one.equal for one in own.values()) else "NO"
            lines.append(f"| {template.name} | {layout.name} | {' | '.join(shown)} | {equal} |")
    return "\n".join(lines)


def _shown(one: Difference) -> str:
    if one.problem:
        return "other tokens"
    numbers = f"{one.logp:.0e} / {one.loss:.0e} / {one.gradient:.0e}"
    return numbers if one.equal else f"**{numbers}**"
