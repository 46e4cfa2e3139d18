"""What ``z2a plan`` says of the training of a recipe: batch, epochs, schedule, and time on this machine. Nothing is
written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import torch

from zero2all.base.errors import Z2aError, is_out_of_memory
from zero2all.base.io import MANIFEST
from zero2all.base.machine.devices import device_title, dtype_name, pick_device, wants_compile
from zero2all.base.machine.gpu_specs import Gpu
from zero2all.checkpoint import InitialWeights
from zero2all.model.cost.describe import with_precision_of
from zero2all.model.cost.flops import flops_per_token
from zero2all.model.cost.model_size import count_parameters
from zero2all.parallel.mesh import ParallelDims, split_stage
from zero2all.planner.rank_plan import plan_recipe_memory
from zero2all.planner.workload import GPU, planned_dtype
from zero2all.recipe import Recipe, ResolvedStage
from zero2all.recipe.load import with_vocab_size
from zero2all.tokenizer import Tokenizer
from zero2all.tokenizer.hf_directory import TOKENIZER_FILES
from zero2all.tokens import EstimatedStore, PackedDataset, TokenStore, estimate_source_tokens
from zero2all.train.extension import ScheduledRun, continue_schedule
from zero2all.train.hyperparameters import choose_hyperparameters, with_hyperparameters
from zero2all.train.initial_weights import find_weights, plan_initial_weights
from zero2all.train.micro_batch import estimate_micro_batch, free_device_memory
from zero2all.train.plan import Plan, StagePlan
from zero2all.train.run import Run, resolve_model_config
from zero2all.train.show_estimate import (
    EstimatedRun,
    LearningRates,
    RunEstimate,
    StageEstimate,
    TimeEstimate,
    TokensState,
    schedule_lines,
)
from zero2all.train.show_plan import epoch_warnings, read_lr_history, scaling_advice
from zero2all.train.step_timing import TIMED_STEPS, StepTiming, time_steps

SCHEDULE_POINTS = 60
UNKNOWN_TOKENS = 2**50  # of each source, where only a plan without epochs is asked for


def estimate_run(recipe: Recipe, world_size: int | None = None, gpu: Gpu | None = None) -> EstimatedRun:
    """What is known of a run on ``gpu``; without one, on this machine, where steps are timed.

    ``world_size`` is the smallest that the parallel layout allows, if not given.
    """
    recipe = recipe if gpu is None else with_precision_of(recipe, gpu)
    state, store, source_tokens = _token_counts(recipe)
    run = Run(recipe, recipe.run_dir)
    chosen = choose_hyperparameters(recipe, source_tokens, run.stored_recipe)
    recipe = _with_vocabulary(with_hyperparameters(recipe, chosen))
    world_size = world_size or ParallelDims.min_world_size(recipe.parallel)
    device, unavailable = _target_device(recipe, gpu)
    is_here = gpu is None and not unavailable
    free = free_device_memory(device, world_size) if is_here else None
    free = gpu.memory if gpu is not None else free
    micro_batch = estimate_micro_batch(recipe, world_size, free, device)
    recipe, chosen = with_hyperparameters(recipe, micro_batch), [*chosen, *micro_batch]
    plan = None if state == "unknown" and _needs_token_counts(recipe) else Plan(recipe, store)
    trained_steps = max(run.checkpoints.steps(), default=0) if run.exists else 0
    plan, resume_warnings = _resumed_plan(recipe, plan, run, trained_steps)
    dims = ParallelDims.from_recipe(recipe.parallel, world_size)
    planned = {} if plan is None else {stage.name: stage for stage in plan.stages}
    stages = [
        _estimate_stage(stage, planned.get(stage.name), recipe, dims, knows_epochs=state != "unknown")
        for stage in recipe.train.resolved_stages()
    ]
    epochs = plan.epochs_by_source() if plan is not None and state != "unknown" else None
    tokens = plan.tokens_before(plan.total_steps) if plan is not None else None
    optimizer = recipe.train.optimizer
    initial, init_warnings = (None, []) if trained_steps else _initial_weights(recipe)
    estimate = RunEstimate(
        run=str(run.directory),
        parameters=count_parameters(recipe.model),
        world_size=world_size,
        mesh=asdict(dims),
        compute_dtype=dtype_name(planned_dtype(recipe, device)),
        token_counts=state,
        steps=None if plan is None else plan.total_steps,
        tokens=tokens,
        trained_steps=trained_steps,
        trained_tokens=0 if plan is None else plan.tokens_before(trained_steps),
        initial_weights=initial,
        stages=stages,
        epochs=epochs,
        learning_rates=LearningRates(
            optimizer.peak_lr,
            optimizer.muon_lr if "muon_lr" in optimizer.plugin.rates else None,
            None if plan is None else _sample_schedule(plan, optimizer.peak_lr),
            chosen,
        ),
        advice=None if tokens is None else scaling_advice(recipe.model, tokens),
        flops=None if plan is None else sum(stage.flops or 0.0 for stage in stages),
        warnings=[*resume_warnings, *init_warnings, *epoch_warnings(epochs or {}), *_padding_warnings(stages)],
        memory_per_rank=plan_recipe_memory(recipe, world_size, device) if gpu is None else None,
        time=_measured_time(recipe, stages, dims, device, unavailable, store) if gpu is None else None,
    )
    lines = schedule_lines(estimate, plan, read_lr_history(run.directory, trained_steps))
    return EstimatedRun(recipe, estimate, lines)


def _token_counts(recipe: Recipe) -> tuple[TokensState, TokenStore | EstimatedStore, Mapping[str, int] | None]:
    """The store, or a stand-in for one that is not built yet, and the tokens of each source if they are known."""
    if (recipe.tokens_dir / MANIFEST).exists():
        store = TokenStore(recipe.tokens_dir, "train")
        return "built", store, store.source_tokens
    if found := estimate_source_tokens(recipe.documents_dir, recipe.tokenizer.vocab_size):
        return "estimated", EstimatedStore(found), found
    names = {name for stage in recipe.train.resolved_stages() for name in stage.mixture}
    names |= {source.name for source in recipe.corpus.sources} or {"text"}
    return "unknown", EstimatedStore(dict.fromkeys(names, UNKNOWN_TOKENS)), None


def _resumed_plan(recipe: Recipe, plan: Plan | None, run: Run, trained_steps: int) -> tuple[Plan | None, list[str]]:
    """The plan from the newest checkpoint on, and why training would refuse to resume."""
    if plan is None or not trained_steps:
        return plan, []
    if trained_steps > plan.total_steps:
        return plan, [f"the run is at step {trained_steps} already, past the {plan.total_steps} asked for"]
    try:
        stored = run.stored_recipe() or recipe
        before = ScheduledRun(stored, Plan(stored, plan.store))
        return continue_schedule(before, ScheduledRun(recipe, plan), trained_steps, None).plan, []
    except Z2aError as error:
        return plan, [str(error)]


def _needs_token_counts(recipe: Recipe) -> bool:
    for stage in recipe.train.resolved_stages():
        lengths = [stage.duration, stage.schedule.warmup, *([stage.batch_ramp.over] if stage.batch_ramp else [])]
        if any(length.unit == "epochs" for length in lengths):
            return True
    return False


def _with_vocabulary(recipe: Recipe) -> Recipe:
    if not _has_tokenizer(recipe):
        return with_vocab_size(recipe)
    return recipe.model_copy(update={"model": resolve_model_config(recipe, Tokenizer(recipe.tokenizer_dir))})


def _initial_weights(recipe: Recipe) -> tuple[InitialWeights | None, list[str]]:
    """What the run would begin with, or why it would not begin."""
    if recipe.train.init is None:
        return None, []
    tokenizer = Tokenizer(recipe.tokenizer_dir) if _has_tokenizer(recipe) else None
    try:
        return plan_initial_weights(find_weights(recipe.train.init), recipe.model, tokenizer).record, []
    except Z2aError as error:
        return None, [f"train.init: {error}"]


def _has_tokenizer(recipe: Recipe) -> bool:
    return (recipe.tokenizer_dir / TOKENIZER_FILES[0]).exists()


def _target_device(recipe: Recipe, gpu: Gpu | None) -> tuple[torch.device, str]:
    """What the run would train on, and why it is not here."""
    if gpu is not None:
        return GPU, ""
    try:
        return pick_device(recipe.train.device), ""
    except Z2aError as error:
        return GPU, str(error)


def _estimate_stage(
    stage: ResolvedStage, planned: StagePlan | None, recipe: Recipe, dims: ParallelDims, *, knows_epochs: bool
) -> StageEstimate:
    flops = flops_per_token(recipe.model, stage.seq_len).model
    tokens = None if planned is None else planned.tokens_before(planned.end_step)
    return StageEstimate(
        name=stage.name,
        length=str(stage.duration),
        seq_len=stage.seq_len,
        batch_tokens=stage.batch_tokens,
        batch=split_stage(stage, recipe.parallel, dims),
        ramp_steps=None if planned is None else planned.ramp_steps,
        steps=None if planned is None else planned.steps,
        tokens=tokens,
        epochs=planned.epochs_by_source() if planned is not None and knows_epochs else None,
        flops_per_token=flops,
        flops=None if tokens is None else float(flops) * tokens,
    )


def _sample_schedule(plan: Plan, peak_lr: float) -> dict[int, float]:
    last = plan.total_steps - 1
    steps = dict.fromkeys(round(point * last / (SCHEDULE_POINTS - 1)) for point in range(SCHEDULE_POINTS))
    return {step: peak_lr * plan.stage_of(step).lr_multiplier(step) for step in steps}


def _padding_warnings(stages: list[StageEstimate]) -> list[str]:
    return [
        f"stage {stage.name}: {stage.batch.padding} samples of every step are padding, because the batch does not "
        "divide over ranks and micro-batches"
        for stage in stages
        if stage.batch.padding
    ]


def _measured_time(
    recipe: Recipe,
    stages: list[StageEstimate],
    dims: ParallelDims,
    device: torch.device,
    unavailable: str,
    store: TokenStore | EstimatedStore,
) -> TimeEstimate:
    reason = unavailable
    if not reason:
        try:
            timing = _time_largest_stage(recipe, stages, device, store)
        except Z2aError as error:
            reason = str(error)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = "out of memory"
    if reason:
        note = f"not measured: {reason}; name a GPU to compute it, such as --gpu h100"
        return TimeEstimate("unknown", "this machine", None, None, None, note)
    # Every rank computes its share of a batch, and updates its shards.
    updates = timing.update_seconds * dims.dp_replicate / dims.world_size
    seconds_per_token = [
        stage.flops_per_token / (timing.flops * dims.world_size) + updates / stage.batch_tokens for stage in stages
    ]
    ranks = "" if dims.world_size == 1 else f"{dims.world_size} x "
    notes = [f"{TIMED_STEPS} steps of {timing.samples} samples"]
    notes += ["one process, without communication between ranks"] if dims.world_size > 1 else []
    notes += ["without torch.compile"] if wants_compile(recipe.train.compile, device) else []
    notes.append(f"MFU against {timing.peak.source}")
    mfu, named, note = timing.flops / timing.peak.flops, f"{ranks}{device_title(device)}", ", ".join(notes)
    tokens = [stage.tokens for stage in stages if stage.tokens is not None]
    if len(tokens) < len(stages):
        return TimeEstimate("measured", named, mfu, 1 / seconds_per_token[0], None, note)
    seconds = sum(count * each for count, each in zip(tokens, seconds_per_token, strict=True))
    return TimeEstimate("measured", named, mfu, sum(tokens) / seconds, seconds, note)


def _time_largest_stage(
    recipe: Recipe, stages: list[StageEstimate], device: torch.device, store: TokenStore | EstimatedStore
) -> StepTiming:
    largest = max(range(len(stages)), key=lambda number: stages[number].flops or 0.0)
    stage, samples = recipe.train.resolved_stages()[largest], stages[largest].batch.samples
    if isinstance(store, TokenStore):
        dataset = PackedDataset(
            store,
            stage.seq_len,
            recipe.seed,
            stage.name,
            stage.mixture,
            recipe.train.conversations,
            document_mask=recipe.train.document_mask,
        )
        read = dataset.read(0, samples)
        tokens = torch.from_numpy(read.tokens)
        is_first = None if read.is_first is None else torch.from_numpy(read.is_first)
    else:
        shape, generator = (samples, stage.seq_len + 1), torch.Generator().manual_seed(recipe.seed)
        tokens = torch.randint(0, recipe.model.vocab_size or 1, shape, generator=generator)
        is_first = torch.zeros(shape, dtype=torch.bool) if recipe.train.masks_documents else None
    return time_steps(recipe, stage, tokens, is_first, device)
