"""Setup of a run before its first step: mesh, model, optimizers, newest checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from zero2all.checkpoint import CheckpointManager, RankGroup, RestorePoint, RunIdentity, TrainingState, run_lock
from zero2all.checkpoint.training_state import LossScaleState, RopeState
from zero2all.console import console, say, warn
from zero2all.elastic.heartbeat import Heartbeat, StartupPhase
from zero2all.errors import Interrupted, UsageError, Z2aError
from zero2all.hardware import compute_dtype, dtype_name, peak_flops, pick_device, set_deterministic
from zero2all.model import document_starts, hf_incompatibility
from zero2all.model.cost.flops import Recompute
from zero2all.model.cost.model_size import count_parameters
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.recipe import Recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore, verify_store
from zero2all.track import RunRecord, open_sinks
from zero2all.track.goodput import compute_run_goodput, format_goodput
from zero2all.train.optimizer import apply_settings, build_optimizers
from zero2all.train.plan import Plan, StagePlan
from zero2all.train.run import Run, resolve_model_config
from zero2all.train.show_plan import say_plan, say_scaling_advice
from zero2all.train.source_losses import SourceLosses
from zero2all.train.spike_detector import SpikeDetector
from zero2all.train.throughput import ThroughputMeter
from zero2all.units import show_count


@dataclass
class TrainState:
    """A run, ready to train from ``first_step``."""

    run: Run
    tokenizer: Tokenizer
    plan: Plan
    parallel_model: ParallelModel
    optimizers: list[Optimizer]
    source_losses: SourceLosses
    throughput: ThroughputMeter
    checkpoint_manager: CheckpointManager
    guard: SpikeDetector
    identity: RunIdentity
    heartbeat: Heartbeat
    first_step: int
    resume_step: int = 0
    """Where the loop starts: at ``first_step``, or after a rollback at an earlier step."""
    start_time: float = 0.0
    """When start-up began."""
    skipped_steps: list[int] = field(default_factory=list)
    """Steps that are skipped, since their data is bad."""
    last_validation: dict[str, Any] = field(default_factory=dict)
    """The last evaluation and its step."""

    def open_record(self) -> RunRecord:
        """Every rank writes its own record; the sinks of the recipe get that of rank 0."""
        options, rank = self.run.recipe.track, self.parallel_model.mesh.rank
        sinks = open_sinks(options.sinks, self.run.directory) if rank == 0 else []
        return RunRecord(self.run.record_path, rank=rank, sinks=sinks, system_every=options.system_every)

    def enter_stage(self, stage: StagePlan) -> None:
        """Apply what a stage changes beside samples and learning rate; the rest stays as in the stage before."""
        theta, scaling = self.plan.rope(stage)
        if (theta, scaling) != (
            self.parallel_model.model.config.rope_theta,
            self.parallel_model.model.config.rope_scaling,
        ):
            self.parallel_model.set_rope(theta, scaling)

    def doc_starts(self, inputs: Tensor) -> Tensor | None:
        """Where the document of each token begins, if the recipe masks across documents."""
        masked = self.run.recipe.train.document_mask
        return document_starts(inputs, self.tokenizer.eos_token_id) if masked else None

    def restore(self, state: TrainingState) -> None:
        """Restore what a checkpoint holds beside the tensors; gradients of an unfinished step are dropped."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        apply_settings(self.optimizers, self.run.recipe.train.optimizer)
        self.guard.load_state(state.guard)
        if self.parallel_model.loss_scaler is not None and state.loss_scale is not None:
            self.parallel_model.loss_scaler.load_state_dict(asdict(state.loss_scale))
        self.skipped_steps = list(state.skipped)

    def save(self, done: int, last: bool = False) -> float | None:
        """Save a checkpoint after ``done`` steps if one is due; returns the seconds that training stalled."""
        options, plan = self.run.recipe.checkpoint, self.plan
        durable = plan.is_due(options.every, done) or last
        if not (durable or plan.is_due(options.flash_every, done)):
            return None
        theta, scaling = plan.rope(plan.stage_of(done - 1))
        scaler, validated = self.parallel_model.loss_scaler, self.last_validation.get("step") == done
        state = TrainingState(
            **vars(self.identity),
            rope=RopeState(theta, None if scaling is None else scaling.model_dump(mode="json")),
            guard=self.guard.state(),
            loss_scale=None if scaler is None else LossScaleState(scaler.value, scaler.good_steps),
            skipped=self.skipped_steps,
            permanent=plan.is_due(options.keep_every, done),
            bits_per_byte=self.last_validation.get("bits_per_byte") if validated else None,
        )
        stall = self.checkpoint_manager.save(done, state, durable)
        if last:
            self.checkpoint_manager.wait_until_saved()
        return stall

    def save_last(self) -> None:
        """Save the final checkpoint to durable storage, unless a valid one is there."""
        self.checkpoint_manager.finish_pending_write()  # the rank group may be busy writing
        if not self.checkpoint_manager.rank_group.on_rank0(
            lambda: self.run.checkpoints.is_valid(self.plan.total_steps)
        ):
            self.save(self.plan.total_steps, last=True)

    def log_goodput(self, record: RunRecord) -> float | None:
        """Log and record the goodput of the run over all its restarts, on rank 0 only."""
        if self.parallel_model.mesh.rank != 0:
            return None
        record.flush()
        report = compute_run_goodput(self.run.directory, ended=time.time())
        record.event("goodput", step=self.plan.total_steps, **report)
        say(format_goodput(report))
        goodput: float | None = report["goodput"]
        return goodput


@contextmanager
def prepare(recipe: Recipe, start_time: float) -> Iterator[TrainState]:
    """Parallelize the model, build the optimizers, load the newest checkpoint, save the metadata; and clean up."""
    options = recipe.train
    set_deterministic(options.deterministic, options.device)
    device = pick_device(options.device)
    heartbeat = Heartbeat.from_environment()
    heartbeat.set_run_directory(recipe.run_dir)
    mesh = ParallelMesh.init_distributed(recipe.parallel, device)
    heartbeat.record_phase(StartupPhase.JOINED)
    console.quiet = mesh.rank != 0
    run, rank_group = Run(recipe, recipe.run_dir), RankGroup()
    with ExitStack() as stack:
        rank_group.on_rank0(lambda: stack.enter_context(run_lock(run.directory)))
        job = _prepare(run, mesh, rank_group, heartbeat)
        job.start_time = start_time
        outcome: Literal["finished", "stopped", "failed"] = "failed"
        try:
            yield job
            outcome = "finished"
        except Interrupted:
            outcome = "stopped"
            raise
        finally:
            heartbeat.record_phase(StartupPhase.ENDING)
            job.checkpoint_manager.close(outcome)
            if outcome != "failed":  # after a failure other ranks may be gone, and torch would wait for them
                mesh.close()


def _prepare(run: Run, mesh: ParallelMesh, rank_group: RankGroup, heartbeat: Heartbeat) -> TrainState:
    recipe, options, device = run.recipe, run.recipe.train, mesh.device
    tokenizer, store = Tokenizer(recipe.tokenizer_dir), TokenStore(recipe.tokens_dir, "train")
    if store.tokenizer_fingerprint != tokenizer.fingerprint:
        raise Z2aError(f"{recipe.tokens_dir} was made with another tokenizer: run 'z2a tokens build' again")
    for split_store in (store, TokenStore(recipe.tokens_dir, "valid")):
        rank_group.on_all_ranks(partial(verify_store, split_store, rank_group.rank, rank_group.world_size))
    plan = Plan(recipe, store)
    dtype = compute_dtype(options.precision, device)
    config = resolve_model_config(recipe, tokenizer)
    parallel_model = ParallelModel(
        config, recipe.parallel, mesh, seed=recipe.seed, dtype=dtype, compile=options.compile
    )
    optimizers = build_optimizers(
        parallel_model.model, options.optimizer, parallel_model.param_groups, config.mup_width_mult
    )
    identity = RunIdentity(
        stages=plan.identity(),
        tokenizer=tokenizer.fingerprint,
        model=config.model_dump(mode="json", exclude={"preset", "ops"}),
        optimizer=options.optimizer.name,
    )
    flash = rank_group.on_rank0(run.create_flash_dir) if recipe.checkpoint.flash_every is not None else None
    replica_group = mesh.get_mesh("dp_replicate").get_group() if mesh.dims.dp_replicate > 1 else None
    checkpoint_manager = CheckpointManager(
        run.checkpoints, flash, run.directory, parallel_model.model, optimizers, rank_group, replica_group
    )
    checkpoint_manager.on_wait = heartbeat.ping
    restored = _resume(run, checkpoint_manager, identity, plan)
    if mesh.rank == 0:
        run.save_metadata(identity, tokenizer, device)
    peak = peak_flops(device, dtype)
    mode = recipe.parallel.activation_checkpointing
    recompute: Recompute = "none" if mode == "budget" else mode  # what the compiler recomputes is unknown
    _say_job(recipe, plan, parallel_model, peak.source)
    heartbeat.record_phase(StartupPhase.LOADED, done=None if restored is None else restored.step)
    job = TrainState(
        run=run,
        tokenizer=tokenizer,
        plan=plan,
        parallel_model=parallel_model,
        optimizers=optimizers,
        source_losses=SourceLosses(plan.sources, tokenizer.token_byte_lengths, device),
        throughput=ThroughputMeter(plan, config, device, peak.flops * mesh.dims.world_size, recompute),
        checkpoint_manager=checkpoint_manager,
        guard=SpikeDetector(options.guard),
        identity=identity,
        heartbeat=heartbeat,
        first_step=restored.step if restored is not None else 0,
        resume_step=restored.step if restored is not None else 0,
    )
    if restored is not None:
        job.restore(restored.state)
    return job


def _resume(run: Run, checkpoint_manager: CheckpointManager, identity: RunIdentity, plan: Plan) -> RestorePoint | None:
    """Load the newest valid state if there is one. Refuse a run with another identity."""
    restored, decision = checkpoint_manager.find_restore_point(), checkpoint_manager.decision
    assert decision is not None
    if restored is None:
        if decision.rejected:
            warn(decision.reason)
        checkpoint_manager.begin_history(None)
        return None
    step, saved = restored.step, restored.state
    # Stages that have not begun may be changed.
    begun = replace(identity, stages=plan.identity(before=step))
    before = replace(saved, stages=[stage for stage in saved.stages if stage.first_step < step])
    changed = [name for name, value in vars(begun).items() if getattr(before, name) != value]
    if changed:
        raise UsageError(
            f"the run in {run.directory} was trained with another {' and '.join(changed)}; "
            "give this one a new place (out=DIR), or remove that directory"
        )
    if step > plan.total_steps:
        raise UsageError(f"the run in {run.directory} is at step {step} already, past the {plan.total_steps} asked for")
    checkpoint_manager.load(restored)
    say(f"resuming after step {step}: restored {decision.reason}")
    return restored


def _say_job(recipe: Recipe, plan: Plan, parallel_model: ParallelModel, peak: str) -> None:
    mesh, parameters = parallel_model.mesh, count_parameters(parallel_model.config).total
    say(
        f"{show_count(parameters)} parameters on {mesh.device.type} in {dtype_name(parallel_model.dtype)} "
        f"({mesh.dims}), "
        f"{show_count(plan.tokens_before(plan.total_steps))} tokens in {plan.total_steps} steps; "
        f"utilisation against {peak}"
    )
    say("ops: " + ", ".join(f"{choice.op} {choice.form}" for choice in parallel_model.model.ops.choices))
    if (reason := hf_incompatibility(parallel_model.config)) is not None:
        warn(f"this model cannot be exported to a standard architecture: {reason}")
    say_plan(plan, recipe.train.optimizer.lr)
    say_scaling_advice(plan, parallel_model.config)
