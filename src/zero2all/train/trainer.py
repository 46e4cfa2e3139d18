"""The trainer: one run on one rank, from its first step or its newest checkpoint to its last step."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from threading import Event
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from zero2all.charts.terminal import sparkline
from zero2all.checkpoint import (
    CheckpointCallbacks,
    CheckpointManager,
    RankGroup,
    ReplicaOptions,
    RunIdentity,
    SentReplica,
    TrainingState,
    run_lock,
)
from zero2all.checkpoint.training_state import LossScaleState, RopeState
from zero2all.console import console, say, warn
from zero2all.cpus import rank_binding
from zero2all.elastic.heartbeat import DEVICE_WATCH, Heartbeat, StartupPhase
from zero2all.environment import set_cuda_environment, set_dump_file
from zero2all.errors import Interrupted, Z2aError
from zero2all.hardware import MPS, PeakFlops, compute_dtype, peak_flops, pick_device, set_deterministic
from zero2all.model.cost.flops import Recompute
from zero2all.model.cost.model_size import count_parameters, weight_dtype
from zero2all.model.z2all import derive_seed
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.parallel.float8 import check_float8
from zero2all.recipe import ExtendMode, Recipe
from zero2all.recipe.run_settings import run_settings
from zero2all.records import to_json
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenShard, TokenStore, verify_store
from zero2all.tokens.test_set import build_test_sets, open_test_sets
from zero2all.track import RunRecord, open_sinks
from zero2all.track.eval_record import LossEvaluation
from zero2all.track.goodput import compute_run_goodput, format_goodput
from zero2all.train.answers import objective_config
from zero2all.train.build_objective import build_objective
from zero2all.train.compile_probe import choose_compile
from zero2all.train.data_loader import Batch, BatchCopier, DataLoader, HostCopy
from zero2all.train.hooks import TrainerHooks
from zero2all.train.hyperparameters import choose_hyperparameters, stored_micro_batch, with_hyperparameters
from zero2all.train.initial_weights import load_initial_weights
from zero2all.train.islands import Islands, build_outer_optimizer, connect_islands, island_place, with_island_run
from zero2all.train.micro_batch import choose_micro_batch
from zero2all.train.optimizer import build_optimizers, map_optimizer_state, set_learning_rate
from zero2all.train.outer_optimizer import OuterOptimizer
from zero2all.train.plan import Plan, StagePlan
from zero2all.train.resume import load_newest, plan_resume, restore_state
from zero2all.train.run import TEST_SETS, Run, init_path, model_identity, require_data, resolve_model_config
from zero2all.train.samples import record_samples
from zero2all.train.show_plan import read_lr_history, say_run
from zero2all.train.signals import stop_requested
from zero2all.train.spike_detector import (
    DETECTION_DELAY,
    SpikeDetector,
    format_ranges,
    lower_lr_hint,
    report_spike,
    shown_norms,
)
from zero2all.train.step_objective import StepLoss, TokenObjective, idle_reason
from zero2all.train.step_timer import StepMarks, StepTime, StepTimer
from zero2all.train.throughput import PER_RANK_METRICS, ThroughputMeter

Evaluator = Callable[[ParallelModel, Tokenizer, Recipe, Mapping[str, TokenShard]], LossEvaluation]
SpikeAction = Literal["update", "skip", "rollback"]
GC_INTERVAL_STEPS = 100
LATE_DEVICES = ("cuda",)  # whose host would wait for the step: a CPU computes it itself
MAX_SPIKES_IN_A_ROW = 20  # or rollbacks to the same state, before the run stops


def train(
    recipe: Recipe,
    hooks: TrainerHooks | None = None,
    evaluate: Evaluator | None = None,
    start_time: float | None = None,
    extend: ExtendMode | None = None,
) -> TrainSummary:
    """Train for the recipe's duration, resuming where an earlier call stopped.

    ``evaluate`` is called every ``evals.every`` with the model and the test sets of the recipe; what it returns goes to
    the record. Time counts as start-up from ``start_time`` on: now, if not given. ``extend`` says how
    the learning rate continues if the schedule of a stage that has begun was changed.
    """
    with Trainer(recipe, hooks, evaluate, start_time, extend) as trainer:
        summary = trainer.train()
    del trainer
    gc.collect()  # its callbacks refer to it, so its model would stay in memory until the next collection
    return summary


@dataclass(frozen=True)
class TrainSummary:
    """The result of ``train``."""

    run: str
    steps: int
    resumed_at: int
    loss: float | None
    """Loss of the last step; None if all steps had been trained before."""
    tokens: int
    parameters: int
    goodput: float | None


@dataclass(frozen=True)
class StepResult:
    """What a step computed; the same on every rank but for its time."""

    loss: float
    grad_norm: float
    lr: float
    metrics: dict[str, float]
    """Of the objective, such as the loss of each source."""
    action: SpikeAction
    stop_requested: bool
    """On any rank."""
    time: StepTime
    """Of this rank."""


@dataclass(frozen=True)
class LaunchedStep:
    batch: Batch
    metrics: HostCopy
    """Sums of the objective, stop flags and norm of the gradient as rows, then the norm of each layer."""
    marks: StepMarks
    """Complete when the metrics are."""


class Trainer:
    """Trains a recipe, from scratch or resumed from the newest checkpoint.

    >>> with Trainer(load_recipe("recipes/quickstart.yaml")) as trainer:
    ...     summary = trainer.train()

    ``train`` is the loop, ``train_step`` computes a step, ``after_step`` records, validates and saves it.
    """

    record: RunRecord
    loader: DataLoader
    stop_event: Event

    def __init__(
        self,
        recipe: Recipe,
        hooks: TrainerHooks | None = None,
        evaluate: Evaluator | None = None,
        start_time: float | None = None,
        extend: ExtendMode | None = None,
    ) -> None:
        """Join the other ranks, build model and optimizers, load the newest checkpoint."""
        require_data(recipe)
        if evaluate is not None and recipe.evals.every is not None:  # fail now, not after hours of training
            TokenStore(recipe.tokens_dir, "valid").require_full_sequence(recipe.train.seq_len)
        self.island_place = island_place(recipe)
        self._island_seed = () if self.island_place is None else (self.island_place.island,)
        recipe = with_island_run(recipe, self.island_place)
        self.recipe, self.hooks, self.evaluate = recipe, hooks or TrainerHooks(), evaluate
        self.start_time = start_time or time.time()
        # These before the device is used.
        set_deterministic(recipe.train.deterministic, recipe.train.device)
        set_cuda_environment()
        set_dump_file(f"{recipe.run_dir / 'flight-recorder-rank-'}")
        device = pick_device(recipe.train.device)
        self.heartbeat = Heartbeat.from_environment()
        self.heartbeat.set_run_directory(recipe.run_dir)
        self.mesh = ParallelMesh.init_distributed(recipe.parallel, device)
        self.heartbeat.record_phase(StartupPhase.JOINED)
        console.quiet = self.mesh.rank != 0
        self.hooks.on_start()
        self.run, self.rank_group = Run(recipe, recipe.run_dir), RankGroup()
        with ExitStack() as stack:
            self.rank_group.on_rank0(self.run.check_directory)
            self.rank_group.on_rank0(lambda: stack.enter_context(run_lock(self.run.directory)))
            if self.rank_group.on_rank0(lambda: self.run.exists):  # a first start fails at once
                self.rank_group.on_rank0(self.run.checkpoints.wait_until_readable)
            self._init_data()
            self._init_model()
            self._init_checkpoints(extend)
            self._exit_stack = stack.pop_all()  # holds the run lock

    def _init_data(self) -> None:
        self.tokenizer = Tokenizer(self.recipe.tokenizer_dir)
        tokens_dir, ranks = self.recipe.tokens_dir, self.rank_group
        store = TokenStore(tokens_dir, "train")
        if store.tokenizer_fingerprint != self.tokenizer.fingerprint:
            raise Z2aError(f"{tokens_dir} was made with another tokenizer: run 'z2a tokens build' again")
        store.require_kinds(self.recipe.train.objective, self.recipe.train.mixture_names)
        for split_store in (store, TokenStore(tokens_dir, "valid")):
            ranks.on_all_ranks(partial(verify_store, split_store, ranks.rank, ranks.world_size))
        self._open_test_sets()
        self._choose_hyperparameters(store)
        self.plan = Plan(self.recipe, store)
        self._stage: StagePlan | None = None

    def _open_test_sets(self) -> None:
        """Rank 0 tokenizes them once, into the run directory, which every rank sees and no other run writes to."""
        self.test_sets: dict[str, TokenShard] = {}
        if self.evaluate is not None and self.recipe.evals.every is not None and self.recipe.evals.test_sets:
            paths, directory = self.recipe.evals.test_sets, self.run.directory / TEST_SETS
            self.rank_group.on_rank0(lambda: build_test_sets(paths, self.tokenizer, directory))
            self.test_sets = open_test_sets(paths, directory)

    def _choose_hyperparameters(self, store: TokenStore) -> None:
        """Fill in what the recipe leaves open; every rank does as rank 0, which reads the recipe of the run."""
        recipe, run = self.recipe, self.run
        self.chosen = self.rank_group.on_rank0(
            lambda: choose_hyperparameters(recipe, store.source_tokens, run.stored_recipe)
        )
        self.recipe = run.recipe = with_hyperparameters(recipe, self.chosen)

    def _init_model(self) -> None:
        options, device = self.recipe.train, self.mesh.device
        self.config = objective_config(resolve_model_config(self.recipe, self.tokenizer), options.objective)
        dtype = compute_dtype(options.compute_precision, device)
        compile = choose_compile(self.recipe, self.config, device, dtype, self.rank_group)
        if options.float8 is not None:
            check_float8(device, dtype, compile)
        self.model = ParallelModel(
            self.config,
            self.recipe.parallel,
            self.mesh,
            seed=self.recipe.seed,
            dtype=dtype,
            compile=compile,
            float8=options.float8,
            weight_dtype=weight_dtype(options.optimizer),
        )
        if options.objective.weighs_tokens:
            self.model.disable_auxiliary_losses()
        stored = self.rank_group.on_rank0(lambda: stored_micro_batch(self.recipe, self.run.stored_recipe))
        if chosen := choose_micro_batch(self.recipe, self.model, compile, self.rank_group, stored):
            self.chosen += chosen
            self.recipe = self.run.recipe = with_hyperparameters(self.recipe, chosen)
            self.plan = Plan(self.recipe, self.plan.store)
        self.optimizers = build_optimizers(
            self.model.model,
            options.optimizer,
            self.model.param_groups,
            self.config.mup_width_mult,
            self.model.ddp_group,
            seed=self.recipe.seed,
            compile=compile and self.recipe.parallel.offload == "none",  # probed for the GPU, not for the host
        )
        if (directory := self.recipe.parallel.offload_dir) is not None:
            self.rank_group.on_all_ranks(partial(map_optimizer_state, self.optimizers, directory))
        if self.evaluate is not None and self.recipe.evals.every is not None and not self.model.is_replicated:
            say("validation generates no samples: the weights are sharded; use 'z2a chat --prompt' with a checkpoint")
        self.copier = BatchCopier(device, self.model.micro_batch_rows)
        self.timer = StepTimer.for_device(device)
        self.guard = SpikeDetector(options.guard)
        self._late_step: LaunchedStep | None = None  # whose metrics are not read yet
        self._stop_seen = False
        self._flash_due_at: int | None = None  # the step of a state in memory that waits for an exchange
        self._retried_steps: set[int] = set()  # steps that were repeated with the same data
        self._consecutive_spikes = 0
        self._was_idle = False  # whether a step without anything to learn has been reported

    def _init_checkpoints(self, extend: ExtendMode | None) -> None:
        recipe, run, ranks = self.recipe, self.run, self.rank_group
        self.skipped_steps: list[int] = []  # since their data is bad
        self.last_validation: tuple[int, LossEvaluation] | None = None  # with the number of steps before it
        self.validation_curve: list[float] = []  # bits per byte since this start
        self.identity = RunIdentity(
            stages=self.plan.identity(),
            tokenizer=self.tokenizer.fingerprint,
            model=model_identity(self.config),
            optimizer=recipe.train.optimizer.name,
            init=init_path(recipe),
            settings=run_settings(recipe),
        )
        outer = None if self.island_place is None else build_outer_optimizer(recipe, self.model)
        self.checkpoint_manager = CheckpointManager(
            run.checkpoints,
            ranks.on_rank0(run.create_flash_dir) if recipe.checkpoint.flash_every is not None else None,
            run.directory,
            self.model.model,
            self.optimizers,
            ranks,
            self.mesh.get_mesh("dp_replicate").get_group() if self.mesh.dims.dp_replicate > 1 else None,
            CheckpointCallbacks(
                on_wait=self.heartbeat.ping,
                # A resume begins after the saved step, so the record must be written up to it.
                before_commit=lambda: not self.record.has_unwritten_lines(),
                on_saved=self._record_checkpoint,
                on_phase=self.hooks.on_checkpoint,
                on_replica=self._record_replica,
            ),
            ReplicaOptions(recipe.checkpoint.replicas, recipe.checkpoint.replica_rate),
            outer,
        )
        # A recipe that cannot continue the run fails here, before a teacher or a reference is computed.
        find_state = partial(plan_resume, self.checkpoint_manager, run, self.plan, self.identity, ranks, extend)
        resumed = find_state()
        # The reference is computed while the model has its initial weights.
        objective, self.initial_weights = build_objective(
            run, self.plan, self.model, self.tokenizer, self.rank_group, self.heartbeat.ping
        )
        resumed = load_newest(self.checkpoint_manager, resumed, find_state)
        restored, self.recipe, run.recipe, self.plan = resumed.restored, resumed.recipe, resumed.recipe, resumed.plan
        self.first_step = self.resume_step = 0 if restored is None else restored.step  # a rollback changes the latter
        self.objective = objective
        if restored is not None:
            self.initial_weights = None
        elif recipe.train.init is not None and self.initial_weights is None:
            self.initial_weights = load_initial_weights(recipe.train.init, self.model, self.tokenizer, ranks)
        self.islands = None if outer is None else self._connect_islands(outer)
        history = None
        if self.mesh.rank == 0:
            run.save_metadata(self.identity, self.tokenizer, self.mesh.device, self.initial_weights)
            self.hooks.on_run(run, self.config, self.mesh.device, self.mesh.dims.world_size)
            history = read_lr_history(run.directory, self.first_step)
        peak = peak_flops(self.mesh.device, self.model.dtype)
        say_run(self.plan, self.model, recipe.train.optimizer.peak_lr, self.chosen, peak.source, history)
        self.heartbeat.record_phase(StartupPhase.LOADED, done=None if restored is None else restored.step)
        self.throughput = self._build_throughput_meter(peak)
        if restored is not None:
            self._restore_state(restored.state)
        elif self.islands is not None:
            self.islands.restore(None)

    def _build_throughput_meter(self, peak: PeakFlops) -> ThroughputMeter:
        parallel = self.recipe.parallel
        mode = parallel.activation_checkpointing
        recompute: Recompute = "none" if mode == "budget" else mode  # what the compiler recomputes is unknown
        return ThroughputMeter(
            self.plan,
            self.config,
            self.mesh.device,
            peak,
            self.model.dtype,
            self.mesh.dims.world_size * parallel.sync.islands,
            recompute,
            parallel.activation_checkpointing_every,
        )

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._exit_stack:
            self.heartbeat.record_phase(StartupPhase.ENDING)
            outcome: Literal["finished", "stopped", "failed"] = "finished"
            if error is not None:
                outcome = "stopped" if isinstance(error, Interrupted) else "failed"
            self.checkpoint_manager.close(outcome)
            if outcome != "failed":  # after a failure other ranks may be gone, and torch would wait for them
                self.mesh.close()

    # Training

    def train(self) -> TrainSummary:
        """Train from the first step, or the one after the newest checkpoint, to the last."""
        plan, mesh, loss = self.plan, self.mesh, None
        copier = None if mesh.device.type == MPS else self.copier  # a Mac's GPU is used by one thread
        place = self.island_place
        island = (0, 1) if place is None else (place.island, place.islands)
        with (
            stop_requested() as self.stop_event,
            self._open_record() as self.record,
            self._meet_islands(),
            DataLoader(
                plan, self.first_step, mesh.dp_rank, mesh.dims.dp, copier, self.skipped_steps, island
            ) as self.loader,
            automatic_gc_disabled(),
            self.timer.watching(self.model),
        ):
            startup = round(time.time() - self.start_time, 3)
            kind = "resume" if self.first_step else "start"
            self.record.event(kind, step=self.first_step, steps=plan.total_steps, startup=startup)
            if (bound := rank_binding()).problem:
                self.record.event("CPU binding", step=self.first_step, problem=bound.problem)
            if (init := self.initial_weights) is not None:
                self.record.event("initial weights", step=0, path=init.path, fingerprint=init.fingerprint)
            self.timer.restart()
            for batch in self.timer.waits(self.loader):
                self.hooks.on_batch(batch)
                is_late = self._can_judge_late(batch)
                if not is_late or batch.stage is not self._stage:
                    self._finish_late_step()
                self._enter_stage(batch)
                if is_late:
                    self._train_step_late(batch)
                    continue
                result = self.train_step(batch)
                loss = result.loss
                if result.action == "rollback" or self._exchange_with_islands(batch, result):
                    self.loader.seek(self.resume_step, self.skipped_steps)
                    self._stage = None  # the step to resume from may be in an earlier one
                    self.timer.restart()
                else:
                    self.after_step(batch, result)
            self._finish_late_step()
            self._save_last()
            goodput = self._log_goodput()
            self.record.event("done", step=plan.total_steps)
        return TrainSummary(
            run=str(self.run.directory),
            steps=plan.total_steps,
            resumed_at=self.first_step,
            loss=loss,
            tokens=plan.tokens_before(plan.total_steps),
            parameters=count_parameters(self.config).total,
            goodput=goodput,
        )

    def train_step(self, batch: Batch) -> StepResult:
        """Forward and backward over micro-batches, clip, reduce the metrics, check for a spike, update."""
        launched = self._launch_step(batch)
        result = self._judge_step(launched)  # before the update, while the weights are those of the step before
        if result.action != "rollback":
            self._update_weights(batch, skip=result.action == "skip")
        return result

    def _launch_step(self, batch: Batch) -> LaunchedStep:
        """Everything up to the update; the host does not wait for it."""
        model = self.model
        DEVICE_WATCH.begin_step(batch.step)
        step_loss = self.objective.begin(model, batch)
        batch = step_loss.batch or batch
        losses = self._forward_backward(batch, step_loss)
        self.hooks.on_gradients(model)
        with self.timer.part("optimizer"):
            grad_norm = model.clip_grad_norm_(self.recipe.train.optimizer.max_grad_norm)  # by the norm over all ranks
        with self.timer.part("logging"):
            # One all-reduce for all metrics and the stop flag.
            sums = self.objective.sums(model, losses, batch)
            sums = model.all_reduce_sum(sums, stop_requested=self.stop_event.is_set())
            norms = grad_norm.to(sums).expand(1, sums.shape[1])
            marks = self.timer.finish_step()  # before the copy, so that they are complete when it is
            return LaunchedStep(batch, HostCopy(torch.cat([sums, norms]), model.layer_grad_norms), marks)

    def _judge_step(self, launched: LaunchedStep) -> StepResult:
        """Read the metrics, the one place where the host waits for the device, and check for a spike."""
        batch = launched.batch
        with self.timer.part("logging"):
            (*rows, stop_flags, (norm, *_)), layer_norms = launched.metrics.tolist()
            step_time = launched.marks.read()
            self._record_layer_norms(batch.step, layer_norms)
        loss = self.objective.loss(rows, batch)
        # The loss of reinforcement learning is near 0 by construction: its changes mean nothing.
        is_around_zero = self.recipe.train.objective.name == "grpo" and math.isfinite(loss)
        action = self.check_spike(batch, 0.0 if is_around_zero else loss, norm, layer_norms)
        lr = self.recipe.train.optimizer.peak_lr * batch.stage.lr_multiplier(batch.step)
        metrics = dict(self.objective.metrics(rows))
        if self.mesh.dims.world_size > 1:
            metrics["sync_bytes"] = float(self.model.sync_bytes)
        self._warn_if_idle(batch, metrics)
        return StepResult(loss, norm, lr, metrics, action, any(stop_flags), step_time)

    def _warn_if_idle(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        """Once: training goes on, and would look as if it learned."""
        reason = None if self._was_idle else idle_reason(batch, self.recipe.train.objective, metrics)
        if reason is not None:
            self._was_idle = True
            warn(f"step {batch.step + 1} learns nothing: {reason}")

    def _connect_islands(self, outer: OuterOptimizer) -> Islands:
        assert self.island_place is not None
        return connect_islands(
            self.island_place, self.recipe, self.identity, self.plan.total_steps, self.model, outer,
            self.heartbeat.ping, lambda: self.stop_event.is_set(),
        )  # fmt: skip

    @contextmanager
    def _meet_islands(self) -> Iterator[None]:
        """Wait for the other islands, if there are any, and for the step to begin with."""
        if self.islands is None:
            yield
            return
        is_done = False
        try:
            self.islands.on_event = self.record.event
            self.first_step = self.resume_step = self.islands.start(self.first_step)
            yield
            is_done = True
        finally:
            self.islands.close(is_done)

    def _exchange_with_islands(self, batch: Batch, result: StepResult) -> bool:
        """Whether this island was behind the others, and continues at their step (``resume_step``)."""
        if self.islands is None:
            return False
        done = batch.step + 1
        with self.timer.part("communication"):
            moved_to = self.islands.after_update(done, settle=result.stop_requested or self._needs_exchange(done))
        if moved_to is None:
            return False
        self.resume_step = moved_to
        self.record.event("resume", step=moved_to, steps=self.plan.total_steps)
        self.throughput.restart_timer()
        return True

    def _update_weights(self, batch: Batch, skip: bool = False) -> None:
        with self.timer.part("optimizer"):
            set_learning_rate(self.optimizers, self.recipe.train.optimizer, batch.stage.lr_multiplier(batch.step))
            for optimizer in self.optimizers:
                if not skip:
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.model.update_expert_bias()

    def _can_judge_late(self, batch: Batch) -> bool:
        """Whether the metrics of a step may be read while the device computes the next one.

        Not before anything that needs the state of exactly this step, and not where the guard may skip the update.
        """
        options, done = self.recipe, batch.step + 1
        if self.mesh.device.type not in LATE_DEVICES or self._stop_seen or type(self.objective) is not TokenObjective:
            return False
        if self.guard.recipe.policy != "warn" or self.model.loss_scaler is not None:
            return False
        if self.islands is not None and self.islands.is_due(done):
            return False
        intervals = (options.evals.every, options.checkpoint.every, options.checkpoint.flash_every)
        return done < self.plan.total_steps and not any(self.plan.is_due(every, done) for every in intervals)

    def _train_step_late(self, batch: Batch) -> None:
        """Launch a step with its update, then read the metrics of the one before."""
        launched = self._launch_step(batch)
        self._update_weights(batch)
        self._finish_late_step()
        self._late_step = launched

    def _finish_late_step(self) -> None:
        launched, self._late_step = self._late_step, None
        if launched is not None:
            result = self._judge_step(launched)
            # The weights are those of a later step, so the next one is not late, and the run stops after it.
            self._stop_seen = result.stop_requested
            self.after_step(launched.batch, replace(result, stop_requested=False))

    def _forward_backward(self, batch: Batch, step_loss: StepLoss) -> Tensor:
        with self.timer.part("data"):
            tensors = batch.on_device or self.copier.copy(
                batch.inputs, batch.targets, batch.doc_starts, batch.micro_batch_size
            )
            tensors.wait()
        with self.timer.part("backward"):  # forward passes and losses are found by hooks of the model
            return self.model.forward_backward(
                tensors.inputs,
                tensors.targets,
                divisor=step_loss.divisor,
                doc_starts_BS=tensors.doc_starts,
                micro_batch_size=batch.micro_batch_size,
                objective=step_loss.objective,
                soft=step_loss.soft,
                cu_seqlens_MN=tensors.cu_seqlens_MN,
                dropout_seed=derive_seed(self.recipe.seed, batch.step, *self._island_seed),
            )

    def after_step(self, batch: Batch, result: StepResult) -> None:
        """Record the step; at intervals log it, validate, save a checkpoint. Stop here if it was requested."""
        step, done, last = batch.step, batch.step + 1, batch.step + 1 == self.plan.total_steps
        self.throughput.update(step, self.loader.data_wait_seconds)
        with self.timer.paused():
            self.throughput.check_peak(step)
        self.hooks.on_step(step, result.time)
        with self.timer.part("logging"):
            metrics = self._record_step(step, result)
            if done % self.recipe.track.log_every == 0 or last or step == self.resume_step:
                self.throughput.say_step(step, metrics)
        if done % GC_INTERVAL_STEPS == 0:
            gc.collect()
        stop_now = result.stop_requested and not last
        with self.timer.paused():
            if self.evaluate is not None and self.plan.is_due(self.recipe.evals.every, done):
                self._validate(step, self.evaluate)
            if stop_now or last:
                # The last checkpoint is waited for, which may take longer than a step.
                self.heartbeat.record_phase(StartupPhase.ENDING)
            if not last and (stall := self.save(done, wait=stop_now)) is not None:
                self.record.step(step, checkpoint_stall=round(stall, 6))
        if stop_now:
            self.record.event("stopped", step=done)
            raise Interrupted(
                f"stopped after step {done} of {self.plan.total_steps}; the same command resumes from there"
            )
        self.throughput.restart_timer()
        self.heartbeat(done)

    def _enter_stage(self, batch: Batch) -> None:
        """Apply what a stage changes beside samples and learning rate; the rest stays as in the stage before."""
        if batch.stage is self._stage:
            return
        self._stage = batch.stage
        self.record.event("stage", step=batch.step, name=batch.stage.name)
        rope = self.plan.rope(batch.stage)
        config = self.model.model.config
        if rope != (config.rope_theta, config.rope_scaling):
            self.model.set_rope(*rope)

    # Record and validation

    def _open_record(self) -> RunRecord:
        """Every rank writes its own record; the sinks of the recipe get that of rank 0."""
        options, rank = self.recipe.track, self.mesh.rank
        sinks = open_sinks(options.sinks, self.run.directory) if rank == 0 else []
        return RunRecord(self.run.record_path, rank=rank, sinks=sinks, ranks=self.rank_group.world_size)

    def _record_step(self, step: int, result: StepResult) -> dict[str, float]:
        metrics = {
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            **result.metrics,
            **self.throughput.metrics(step),
            **({} if self.islands is None else self.islands.take_metrics()),
        }
        names = PER_RANK_METRICS if self.mesh.rank > 0 else metrics
        recorded = {name: metrics[name] for name in names if name in metrics}
        self.record.step(step, **recorded, **result.time.metrics(self.mesh.rank))
        return metrics

    def _validate(self, step: int, evaluate: Evaluator) -> None:
        validation = evaluate(self.model, self.tokenizer, self.recipe, self.test_sets)
        self.last_validation = (step + 1, validation)
        if metrics := self.objective.validate(self.model):
            self.record.step(step, **{f"valid/{name}": value for name, value in metrics.items()})
            say("validation: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        self.record.event("evaluation", step=step, **to_json(validation))
        self.validation_curve.append(validation.bits_per_byte)
        tests = "".join(f", {name} {part.bits_per_byte:.4f}" for name, part in validation.test_sets.items())
        say(
            f"validation after step {step + 1}: {validation.bits_per_byte:.4f} bits per byte{tests}  "
            f"{sparkline(self.validation_curve)}"
        )
        if self.mesh.rank == 0:
            record_samples(self.record, step, self.model, self.tokenizer, self.recipe)

    def _record_layer_norms(self, step: int, norms: list[float]) -> None:
        every = self.recipe.track.layer_norms_every
        if self.mesh.rank == 0 and every is not None and (step + 1) % every == 0:
            self.record.histogram(step, "gradient norm by layer", norms, range(len(norms) + 1))

    def _record_replica(self, sent: SentReplica) -> None:
        self.record.event("replica", **asdict(replace(sent, seconds=round(sent.seconds, 3))))

    def _record_checkpoint(self, step: int, seconds: float) -> None:
        self.record.event("checkpoint", step=step, seconds=round(seconds, 3))

    def _log_goodput(self) -> float | None:
        """Log and record the goodput of the run over all its restarts, on rank 0 only."""
        if self.mesh.rank != 0:
            return None
        self.record.flush()
        report = compute_run_goodput(self.run.directory, ended=time.time())
        self.record.event("goodput", step=self.plan.total_steps, **asdict(report))
        say(format_goodput(report))
        return report.goodput

    # Loss spikes

    def check_spike(
        self, batch: Batch, loss: float, grad_norm: float, layer_norms: Sequence[float] = ()
    ) -> SpikeAction:
        """Whether to update, to skip the update, or to resume at ``resume_step`` after a rollback; all ranks agree."""
        step, policy = batch.step, self.guard.recipe.policy
        scale = self.model.loss_scaler
        if scale is not None and math.isfinite(loss) and not (scale.update(grad_norm) or scale.is_exhausted):
            self.record.event("overflow", step=step, loss_scale=scale.value)  # fp16: the next scale is smaller
            return "skip"
        reason = self.guard.check(step, batch.stage.first_step, loss, grad_norm)
        if reason is None:
            self._consecutive_spikes = 0
            return "update"
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if not finite and policy == "warn":
            norms = shown_norms(layer_norms)
            self.record.event("not finite", step=step, loss=str(loss), grad_norm=str(grad_norm), layer_norms=norms)
            raise Z2aError(self._not_finite_message(step, loss, grad_norm))
        if self.mesh.rank == 0:  # every rank sees the same spike
            report_spike(batch, reason, policy, layer_norms, self.run.directory, self.record)
        if policy == "warn":
            return "update"
        self._consecutive_spikes += 1
        if self._consecutive_spikes > MAX_SPIKES_IN_A_ROW:
            raise Z2aError(
                f"{MAX_SPIKES_IN_A_ROW} outlier steps in a row, the last {step} ({reason}): "
                + lower_lr_hint(self.run.directory, step)
            )
        if policy == "rollback" and self._roll_back(step, finite):
            return "rollback"
        return "skip"

    def _roll_back(self, step: int, finite: bool) -> bool:
        """Load the last state from before the bad data and skip that data. False if there is no such state."""
        # A non-finite value may be a hardware fault: repeat the step once with the same data, then skip it.
        again = not finite and step not in self._retried_steps
        self._retried_steps.add(step)
        self.model.update_expert_bias()  # resets the expert load counted in this step
        first_bad = step - DETECTION_DELAY
        restored = self.checkpoint_manager.roll_back(step if again else max(0, first_bad))
        if restored is None:
            warn(f"there is no state from before step {step} to roll back to: its update is skipped")
            return False
        # Steps that an earlier rollback skipped stay skipped: the loaded state may not know of them yet.
        bad_steps = [] if again else range(first_bad, first_bad + self.guard.recipe.skip)
        skipped = sorted({*self.skipped_steps, *bad_steps})
        self._restore_state(restored.state)
        self.skipped_steps, self.resume_step = skipped, restored.step
        self.throughput.restart_timer()
        self.record.event("rollback", step=step, to=restored.step, skipped=skipped)
        self.record.event("resume", step=restored.step, steps=self.plan.total_steps)
        data = f"skipping steps {format_ranges(skipped)}" if skipped else "with the same data"
        warn(f"rolled back to step {restored.step} {restored.location}, {data}")
        return True

    def _not_finite_message(self, step: int, loss: float, grad_norm: float) -> str:
        with suppress(Z2aError):
            self.checkpoint_manager.wait_until_saved()
        saved = self.run.checkpoints.steps()
        newest = f"; the newest checkpoint is of step {saved[-1]}" if saved else ""
        hint = lower_lr_hint(self.run.directory, step)
        return f"step {step}: loss {loss}, gradient norm {grad_norm}{newest}. {hint[0].upper()}{hint[1:]}"

    # Checkpoints

    def save(self, done: int, wait: bool = False) -> float | None:
        """Save a checkpoint after ``done`` steps if one is due; returns the seconds that training stalled.

        With ``wait`` it is due in any case, and on durable storage when this returns.
        """
        options, plan, model = self.recipe.checkpoint, self.plan, self.model
        if self._flash_due_at is None and plan.is_due(options.flash_every, done):
            self._flash_due_at = done
        is_durable = wait or plan.is_due(options.every, done)
        # To wait for an exchange in flight would undo its overlap, so a state in memory waits until it is merged.
        has_flight = self.islands is not None and self.islands.has_flight
        if not is_durable and (self._flash_due_at is None or has_flight):
            return None
        self._flash_due_at = None
        theta, scaling = plan.rope(plan.stage_of(done - 1))
        scaler, validation = model.loss_scaler, self.last_validation
        state = TrainingState(
            **vars(self.identity),
            rope=RopeState(theta, None if scaling is None else scaling.model_dump(mode="json")),
            guard=self.guard.state(),
            loss_scale=None if scaler is None else LossScaleState(scaler.value, scaler.good_steps),
            skipped=self.skipped_steps,
            islands=None if self.islands is None else self.islands.state(),
            permanent=plan.is_due(options.keep_every, done),
            bits_per_byte=validation[1].bits_per_byte if validation is not None and validation[0] == done else None,
        )
        stall = self.checkpoint_manager.save(done, state, durable=is_durable)
        if wait:
            self.checkpoint_manager.wait_until_saved()
        return stall

    def _needs_exchange(self, done: int) -> bool:
        """Whether a checkpoint follows that must not wait until the exchange in flight is merged; a state in memory
        that has waited for one exchange does not wait for the next."""
        due_at, overlap = self._flash_due_at, self.recipe.parallel.sync.overlap
        return self.plan.is_due(self.recipe.checkpoint.every, done) or (
            due_at is not None and done - due_at >= max(overlap, 1)
        )

    def _save_last(self) -> None:
        """Save the final checkpoint to durable storage, unless a valid one is there."""
        self.checkpoint_manager.finish_pending_write()  # the rank group may be busy writing
        if not self.rank_group.on_rank0(lambda: self.run.checkpoints.is_valid(self.plan.total_steps)):
            self.save(self.plan.total_steps, wait=True)

    def _restore_state(self, state: TrainingState) -> None:
        restore_state(state, self.model, self.optimizers, self.recipe.train.optimizer, self.guard)
        self.skipped_steps = list(state.skipped)
        if self.islands is not None:
            self.islands.restore(state.islands)


@contextmanager
def automatic_gc_disabled() -> Iterator[None]:
    """Automatic garbage collection would stall one rank at a time while all others wait."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
