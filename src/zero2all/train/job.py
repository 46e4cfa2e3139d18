"""Everything that a run needs before its first step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from zero2all.console import console, say, warn
from zero2all.errors import Interrupted, UsageError, Z2aError
from zero2all.hardware import compute_dtype, dtype_name, peak_flops, pick_device, set_deterministic
from zero2all.model import document_starts, why_not_hf
from zero2all.model.anatomy import count_parameters
from zero2all.model.flops import Recompute
from zero2all.parallel import Layout, Spread
from zero2all.recipe import Recipe
from zero2all.resilience import Found, Guard, Keeper, Team, locked
from zero2all.resilience.beat import Beat, Mark
from zero2all.resilience.goodput import goodput_of, in_words
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore, check_store
from zero2all.track import Record, open_sinks
from zero2all.train.channels import Channels
from zero2all.train.clock import Clock
from zero2all.train.optimizer import apply_settings, build_optimizers
from zero2all.train.plan import Plan, StagePlan
from zero2all.train.run import Run, model_config
from zero2all.train.show_plan import say_advice, say_plan
from zero2all.units import show_count


@dataclass
class Job:
    """A run, ready to go on from step ``first``."""

    run: Run
    tokenizer: Tokenizer
    plan: Plan
    spread: Spread
    optimizers: list[Optimizer]
    channels: Channels
    clock: Clock
    keeper: Keeper
    guard: Guard
    identity: dict[str, Any]
    beat: Beat
    first: int
    at: int = 0
    """Where the loop stands: at the first step, or after a rollback at an earlier one than before."""
    began: float = 0.0
    """When the work on it began."""
    skipped: list[int] = field(default_factory=list)
    """Steps that are passed over, since their data is bad."""
    quality: dict[str, Any] = field(default_factory=dict)
    """What the last evaluation found, if it was of the step in hand."""

    def open_record(self) -> Record:
        """Every rank writes its own; the other trackers of the recipe see the first."""
        options, rank = self.run.recipe.track, self.spread.layout.rank
        sinks = open_sinks(options.sinks, self.run.directory) if rank == 0 else []
        return Record(self.run.record_path, rank=rank, sinks=sinks, system_every=options.system_every)

    def enter(self, stage: StagePlan) -> None:
        """What a stage changes beside its samples and its rate. What it does not name is as in the stage before."""
        theta, scaling = self.plan.rope(stage)
        if (theta, scaling) != (self.spread.model.config.rope_theta, self.spread.model.config.rope_scaling):
            self.spread.set_rope(theta, scaling)

    def starts(self, inputs: Tensor) -> Tensor | None:
        """Where the document of each token begins, if documents are kept apart."""
        masked = self.run.recipe.train.document_mask
        return document_starts(inputs, self.tokenizer.end_of_text) if masked else None

    def restore(self, state: dict[str, Any]) -> None:
        """What a state holds beside the tensors. A step that was begun leaves no trace."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        apply_settings(self.optimizers, self.run.recipe.train.optimizer)
        self.guard.restore(state["guard"])
        if self.spread.scale is not None and state["loss_scale"] is not None:
            self.spread.scale.load(state["loss_scale"])
        self.skipped = list(state["skipped"])

    def save(self, done: int, last: bool = False) -> float | None:
        """Keep the state of ``done`` steps where it is due; the seconds that it took, if it was."""
        options, plan = self.run.recipe.checkpoint, self.plan
        durable = plan.is_due(options.every, done) or last
        if not (durable or plan.is_due(options.flash_every, done)):
            return None
        theta, scaling = plan.rope(plan.at(done - 1))
        config = self.spread.config.model_copy(update={"rope_theta": theta, "rope_scaling": scaling})
        state = {
            **self.identity,
            "rope": config.model_dump(mode="json", include={"rope_theta", "rope_scaling"}),
            "guard": self.guard.state(),
            "loss_scale": None if self.spread.scale is None else self.spread.scale.state(),
            "skipped": self.skipped,
            "permanent": plan.is_due(options.keep_every, done),
            "bits_per_byte": self.quality.get("bits_per_byte") if self.quality.get("step") == done else None,
        }
        stall = self.keeper.save(done, state, durable)
        if last:
            self.keeper.wait()
        return stall

    def save_last(self) -> None:
        """A run that is over is on durable storage, also if its last state was only in memory, or is damaged."""
        self.keeper.settle()  # the team may be busy writing
        if not self.keeper.team.first(lambda: self.run.checkpoints.is_whole(self.plan.total)):
            self.save(self.plan.total, last=True)

    def tell_goodput(self, record: Record) -> float | None:
        """Say and write down what the time of the run went to, over all its restarts; only the first rank knows."""
        if self.spread.layout.rank != 0:
            return None
        record.flush()
        found = goodput_of(self.run.directory, ended=time.time())
        record.event("goodput", step=self.plan.total, **found)
        say(in_words(found))
        share: float | None = found["goodput"]
        return share


@contextmanager
def prepare(recipe: Recipe, began: float) -> Iterator[Job]:
    """Lay out the model, build the optimizers, load the newest checkpoint, write down what the run is; and tidy up."""
    options = recipe.train
    set_deterministic(options.deterministic, options.device)
    device = pick_device(options.device)
    beat = Beat.of_this_rank()
    beat.tell(recipe.run_dir)
    layout = Layout.start(recipe.parallel, device)
    beat.mark(Mark.JOINED)
    console.quiet = layout.rank != 0
    run, team = Run(recipe, recipe.run_dir), Team()
    with ExitStack() as stack:
        team.first(lambda: stack.enter_context(locked(run.directory)))
        job = _prepare(run, layout, team, beat)
        job.began = began
        outcome: Literal["finished", "stopped", "failed"] = "failed"
        try:
            yield job
            outcome = "finished"
        except Interrupted:
            outcome = "stopped"
            raise
        finally:
            beat.mark(Mark.ENDING)
            job.keeper.close(outcome)
            if outcome != "failed":  # after a failure the others may be gone, and torch would wait for them
                layout.close()


def _prepare(run: Run, layout: Layout, team: Team, beat: Beat) -> Job:
    recipe, options, device = run.recipe, run.recipe.train, layout.device
    tokenizer, store = Tokenizer(recipe.tokenizer_dir), TokenStore(recipe.tokens_dir, "train")
    if store.tokenizer_fingerprint != tokenizer.fingerprint:
        raise Z2aError(f"{recipe.tokens_dir} was made with another tokenizer: run 'z2a tokens build' again")
    for checked in (store, TokenStore(recipe.tokens_dir, "valid")):
        team.together(partial(check_store, checked, team.rank, team.world))
    plan = Plan(recipe, store)
    dtype = compute_dtype(options.precision, device)
    config = model_config(recipe, tokenizer)
    spread = Spread(config, recipe.parallel, layout, seed=recipe.seed, dtype=dtype, compile=options.compile)
    optimizers = build_optimizers(spread.model, options.optimizer, spread.groups, config.narrower)
    identity = {
        "stages": plan.describe(),
        "tokenizer": tokenizer.fingerprint,
        "model": config.model_dump(mode="json", exclude={"preset", "ops"}),
        "optimizer": options.optimizer.name,
    }
    flash = team.first(run.claim_memory) if recipe.checkpoint.flash_every is not None else None
    copies = layout.mesh("dp_replicate").get_group() if layout.sizes.dp_replicate > 1 else None
    keeper = Keeper(run.checkpoints, flash, run.directory, spread.model, optimizers, team, copies)
    keeper.on_wait = beat.alive
    found = _resume(run, keeper, identity, plan)
    if layout.rank == 0:
        run.write_down(identity, tokenizer, device)
    peak = peak_flops(device, dtype)
    mode = recipe.parallel.activation_checkpointing
    recompute: Recompute = "none" if mode == "budget" else mode  # what the compiler recomputes is not known
    _say_job(recipe, plan, spread, peak.source)
    beat.mark(Mark.LOADED, done=None if found is None else found.step)
    job = Job(
        run=run,
        tokenizer=tokenizer,
        plan=plan,
        spread=spread,
        optimizers=optimizers,
        channels=Channels(plan.sources, tokenizer.text_bytes, device),
        clock=Clock(plan, config, device, peak.flops * layout.sizes.world, recompute),
        keeper=keeper,
        guard=Guard(options.guard),
        identity=identity,
        beat=beat,
        first=found.step if found is not None else 0,
        at=found.step if found is not None else 0,
    )
    if found is not None:
        job.restore(found.state)
    return job


def _resume(run: Run, keeper: Keeper, identity: dict[str, Any], plan: Plan) -> Found | None:
    """Load the newest valid state if there is one. A run that is not the same run is refused."""
    found, decision = keeper.newest(), keeper.decision
    assert decision is not None
    if found is None:
        if decision.rejected:
            warn(decision.reason)
        keeper.begin(None)
        return None
    step, saved = found.step, found.state
    # Stages that have not begun may be planned anew.
    begun = {**identity, "stages": plan.describe(before=step)}
    before = {**saved, "stages": [stage for stage in saved.get("stages", []) if stage["first_step"] < step]}
    changed = [name for name, value in begun.items() if before.get(name) != value]
    if changed:
        raise UsageError(
            f"the run in {run.directory} was trained with another {' and '.join(changed)}; "
            "give this one a new place (out=DIR), or remove that directory"
        )
    if step > plan.total:
        raise UsageError(f"the run in {run.directory} is at step {step} already, past the {plan.total} asked for")
    keeper.load(found)
    say(f"resuming after step {step}: restored {decision.reason}")
    return found


def _say_job(recipe: Recipe, plan: Plan, spread: Spread, peak: str) -> None:
    layout, parameters = spread.layout, count_parameters(spread.config).total
    say(
        f"{show_count(parameters)} parameters on {layout.device.type} in {dtype_name(spread.dtype)} ({layout.sizes}), "
        f"{show_count(plan.tokens_before(plan.total))} tokens in {plan.total} steps; utilisation against {peak}"
    )
    say("ops: " + ", ".join(f"{choice.op} {choice.form}" for choice in spread.model.ops.table))
    if (reason := why_not_hf(spread.config)) is not None:
        warn(f"this model cannot be exported to a standard architecture: {reason}")
    say_plan(plan, recipe.train.optimizer.lr)
    say_advice(plan, spread.config)
