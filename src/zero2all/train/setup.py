"""From a recipe to a ``TrainingJob``: ranks, data, values that the recipe leaves open, model, optimizers, and the state
that an earlier start has saved."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from torch.optim import Optimizer

from zero2all.base.console import console, say
from zero2all.base.environment import set_cuda_environment, set_dump_file
from zero2all.base.errors import Z2aError
from zero2all.base.machine.devices import compute_dtype, peak_flops, pick_device, set_deterministic
from zero2all.checkpoint import (
    CheckpointedModel,
    CheckpointManager,
    CheckpointPlaces,
    RankGroup,
    ReplicaOptions,
    RestorePoint,
    RunIdentity,
    run_lock,
)
from zero2all.checkpoint.checkpoint_directory import wait_until_readable
from zero2all.cluster.launch.heartbeat import Heartbeat, StartupPhase
from zero2all.model.cost.flops import Recompute
from zero2all.model.cost.model_size import weight_dtype
from zero2all.optim.optimizer import build_optimizers, map_optimizer_state
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.parallel.float8 import check_float8
from zero2all.recipe import ExtendMode, ModelConfig, Recipe
from zero2all.recipe.named_plugins import require_run_plugins
from zero2all.recipe.run_settings import run_settings
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenShard, TokenStore, verify_store
from zero2all.tokens.evaluation_set import build_test_sets, open_test_sets
from zero2all.train.compile_probe import choose_compile
from zero2all.train.diloco.islands import (
    IslandRun,
    build_outer_optimizer,
    connect_islands,
    island_place,
    with_island_run,
)
from zero2all.train.diloco.outer_optimizer import OuterOptimizer
from zero2all.train.hyperparameters import ChosenValue, choose_hyperparameters, stored_micro_batch, with_hyperparameters
from zero2all.train.initial_weights import load_initial_weights
from zero2all.train.job import Evaluator, Progress, TrainerHooks, TrainingJob
from zero2all.train.micro_batch import choose_micro_batch
from zero2all.train.objectives.build import ObjectiveInputs, build_objective
from zero2all.train.objectives.completions import objective_config
from zero2all.train.plan import Plan
from zero2all.train.recording import Recorder
from zero2all.train.resume import load_newest, plan_resume
from zero2all.train.run import TEST_SETS, Run, init_path, model_identity, require_data, resolve_model_config
from zero2all.train.show_plan import read_lr_history, say_run
from zero2all.train.spike_detector import SpikeDetector
from zero2all.train.throughput import FlopsCount, ThroughputMeter


def set_up(
    recipe: Recipe,
    hooks: TrainerHooks,
    evaluate: Evaluator | None,
    extend: ExtendMode | None,
    progress: Progress,
    stack: ExitStack,
) -> TrainingJob:
    """Join the other ranks, build everything, load the newest checkpoint. ``stack`` then holds the lock of the run."""
    evaluate = _require_data(recipe, evaluate)
    place = island_place(recipe)
    recipe = with_island_run(recipe, place)
    mesh, heartbeat = _join_ranks(recipe, hooks)
    run, ranks = _lock_run(recipe, stack)
    # Data, and the values that depend on how much of it there is.
    tokenizer, store = _open_data(recipe, ranks)
    test_sets = {} if evaluate is None else _open_test_sets(run, tokenizer, ranks)
    recipe, chosen = _choose_hyperparameters(recipe, run, store, ranks)
    # The model, and the micro-batch that fits beside it.
    config = objective_config(resolve_model_config(recipe, tokenizer), recipe.train.objective)
    model = _build_model(recipe, config, mesh, ranks)
    micro_batch = _choose_micro_batch(recipe, model, run, ranks)
    recipe = with_hyperparameters(recipe, micro_batch)
    run, plan = run.with_recipe(recipe), Plan(recipe, store)  # with the micro-batch
    optimizers = _build_optimizers(recipe, model, ranks)
    # The state of an earlier start, if there is one.
    outer = None if place is None else build_outer_optimizer(recipe, model)
    recorder = Recorder(run, mesh.rank, ranks.world_size)
    replica_group = mesh.get_mesh("dp_replicate").get_group() if mesh.dims.dp_replicate > 1 else None
    saved = CheckpointedModel(model.model, optimizers, outer, replica_group)
    callbacks = recorder.checkpoint_callbacks(heartbeat.ping, hooks.on_checkpoint)
    checkpoints = CheckpointManager(_checkpoint_places(run, recipe, ranks), saved, ranks, callbacks)
    identity = _identity(recipe, plan, tokenizer, config)
    # A recipe that cannot continue the run fails here, before a teacher or a reference is computed.
    find_state = partial(plan_resume, checkpoints, run, plan, identity, ranks, extend)
    resumed = find_state()
    # The reference is computed while the model has its initial weights.
    objective, initial_weights = build_objective(ObjectiveInputs(run, plan, model, tokenizer, ranks, heartbeat.ping))
    resumed = load_newest(checkpoints, resumed, find_state)
    restored, recipe, plan = resumed.restored, resumed.recipe, resumed.plan  # the schedule may have been extended
    run = run.with_recipe(recipe)
    if restored is None and recipe.train.init is not None and initial_weights is None:
        initial_weights = load_initial_weights(recipe.train.init, model, tokenizer, ranks)
    job = TrainingJob(
        recipe,
        hooks,
        run,
        mesh,
        ranks,
        heartbeat,
        recorder,
        tokenizer,
        plan,
        config,
        model,
        optimizers,
        objective,
        SpikeDetector(recipe.train.guard),
        _throughput_meter(recipe, plan, config, model),
        identity,
        checkpoints,
        initial_weights if restored is None else None,
        evaluate,
        test_sets,
        place,
    )
    job = _connect_islands(job, outer, progress)
    _start(job, progress, restored, [*chosen, *micro_batch])
    return job


def _connect_islands(job: TrainingJob, outer: OuterOptimizer | None, progress: Progress) -> TrainingJob:
    if job.place is None or outer is None:
        return job
    own = IslandRun(job.place, job.recipe, job.identity, job.plan.total_steps)
    return replace(job, islands=connect_islands(own, job.model, outer, job.heartbeat.ping, progress.is_stopping))


def _start(job: TrainingJob, progress: Progress, restored: RestorePoint | None, chosen: list[ChosenValue]) -> None:
    """Continue where a checkpoint was saved, if there is one."""
    if restored is not None:
        progress.first_step = progress.resume_step = restored.step
    _announce(job, progress, chosen)
    job.heartbeat.record_phase(StartupPhase.LOADED, done=None if restored is None else restored.step)
    if restored is not None:
        progress.restore(job, restored.state)
    elif job.islands is not None:
        job.islands.restore(None)


def _require_data(recipe: Recipe, evaluate: Evaluator | None) -> Evaluator | None:
    """Fail now, not after hours of training; how to validate, if the recipe asks for it."""
    require_data(recipe)
    if evaluate is None or recipe.evals.every is None:
        return None
    TokenStore(recipe.tokens_dir, "valid").require_full_sequence(recipe.train.seq_len)
    return evaluate


def _join_ranks(recipe: Recipe, hooks: TrainerHooks) -> tuple[ParallelMesh, Heartbeat]:
    # These before the device is used.
    set_deterministic(on=recipe.train.deterministic, wanted=recipe.train.device)
    set_cuda_environment()
    set_dump_file(f"{recipe.run_dir / 'flight-recorder-rank-'}")
    device = pick_device(recipe.train.device)
    heartbeat = Heartbeat.from_environment()
    heartbeat.set_run_directory(recipe.run_dir)
    mesh = ParallelMesh.init_distributed(recipe.parallel, device)
    heartbeat.record_phase(StartupPhase.JOINED)
    require_run_plugins(recipe, shards=mesh.dims.dp_shard > 1)
    console.quiet = mesh.rank != 0
    hooks.on_start()
    return mesh, heartbeat


def _lock_run(recipe: Recipe, stack: ExitStack) -> tuple[Run, RankGroup]:
    run, ranks = Run(recipe, recipe.run_dir), RankGroup()
    ranks.on_rank0(run.check_directory)
    ranks.on_rank0(lambda: stack.enter_context(run_lock(run.directory)))
    if ranks.on_rank0(lambda: run.exists):  # a first start fails at once
        ranks.on_rank0(lambda: wait_until_readable(run.checkpoints))
    return run, ranks


def _choose_hyperparameters(
    recipe: Recipe, run: Run, store: TokenStore, ranks: RankGroup
) -> tuple[Recipe, list[ChosenValue]]:
    chosen = ranks.on_rank0(lambda: choose_hyperparameters(recipe, store.source_tokens, run.stored_recipe))
    recipe = with_hyperparameters(recipe, chosen)
    Plan(recipe, store)  # its errors are raised before a large model is built
    return recipe, chosen


def _checkpoint_places(run: Run, recipe: Recipe, ranks: RankGroup) -> CheckpointPlaces:
    flash = ranks.on_rank0(run.create_flash_dir) if recipe.checkpoint.flash_every is not None else None
    replicas = ReplicaOptions(recipe.checkpoint.replicas, recipe.checkpoint.replica_rate)
    return CheckpointPlaces(run.checkpoints, run.directory, flash, replicas)


def _open_data(recipe: Recipe, ranks: RankGroup) -> tuple[Tokenizer, TokenStore]:
    tokenizer, directory = Tokenizer(recipe.tokenizer_dir), recipe.tokens_dir
    store = TokenStore(directory, "train")
    if store.tokenizer_fingerprint != tokenizer.fingerprint:
        raise Z2aError(f"{directory} was made with another tokenizer: run 'z2a tokens build' again")
    store.require_kinds(recipe.train.objective, recipe.train.mixture_names)
    for split_store in (store, TokenStore(directory, "valid")):
        ranks.on_all_ranks(partial(verify_store, split_store, ranks.rank, ranks.world_size))
    return tokenizer, store


def _open_test_sets(run: Run, tokenizer: Tokenizer, ranks: RankGroup) -> dict[str, TokenShard]:
    """Rank 0 tokenizes them once, into the run directory, which every rank sees and no other run writes to."""
    paths, directory = run.recipe.evals.test_sets, run.directory / TEST_SETS
    if not paths:
        return {}
    ranks.on_rank0(lambda: build_test_sets(paths, tokenizer, directory))
    return open_test_sets(paths, directory)


def _build_model(recipe: Recipe, config: ModelConfig, mesh: ParallelMesh, ranks: RankGroup) -> ParallelModel:
    options = recipe.train
    dtype = compute_dtype(options.compute_precision, mesh.device)
    compile = choose_compile(recipe, config, mesh.device, dtype, ranks)
    if options.float8 is not None:
        check_float8(mesh.device, dtype, compile=compile)
    model = ParallelModel(
        config,
        recipe.parallel,
        mesh,
        seed=recipe.seed,
        dtype=dtype,
        compile=compile,
        float8=options.float8,
        weight_dtype=weight_dtype(options.optimizer),
    )
    if options.objective.weighs_tokens:
        model.disable_auxiliary_losses()
    return model


def _choose_micro_batch(recipe: Recipe, model: ParallelModel, run: Run, ranks: RankGroup) -> list[ChosenValue]:
    stored = ranks.on_rank0(lambda: stored_micro_batch(recipe, run.stored_recipe))
    return choose_micro_batch(recipe, model, compile=model.is_compiled, ranks=ranks, stored=stored)


def _build_optimizers(recipe: Recipe, model: ParallelModel, ranks: RankGroup) -> list[Optimizer]:
    optimizers = build_optimizers(
        model.model,
        recipe.train.optimizer,
        model.param_groups,
        model.config.mup_width_mult,
        model.ddp_group,
        seed=recipe.seed,
        compile=model.is_compiled and recipe.parallel.offload == "none",  # probed for the GPU, not for the host
    )
    if (directory := recipe.parallel.offload_dir) is not None:
        ranks.on_all_ranks(partial(map_optimizer_state, optimizers, directory))
    return optimizers


def _identity(recipe: Recipe, plan: Plan, tokenizer: Tokenizer, config: ModelConfig) -> RunIdentity:
    return RunIdentity(
        stages=plan.identity(),
        tokenizer=tokenizer.fingerprint,
        model=model_identity(config),
        optimizer=recipe.train.optimizer.name,
        init=init_path(recipe),
        settings=run_settings(recipe),
    )


def _throughput_meter(recipe: Recipe, plan: Plan, config: ModelConfig, model: ParallelModel) -> ThroughputMeter:
    parallel, mesh = recipe.parallel, model.mesh
    mode = parallel.activation_checkpointing
    recompute: Recompute = "none" if mode == "budget" else mode  # what the compiler recomputes is unknown
    return ThroughputMeter(
        plan,
        FlopsCount(config, recompute, parallel.activation_checkpointing_every),
        mesh.device,
        peak_flops(mesh.device, model.dtype),
        model.dtype,
        mesh.dims.world_size * parallel.sync.islands,
    )


def _announce(job: TrainingJob, progress: Progress, chosen: list[ChosenValue]) -> None:
    """Write the metadata of the run, and say what it is."""
    if job.evaluate is not None and not job.model.is_replicated:
        say("validation generates no samples: the weights are sharded; use 'z2a chat --prompt' with a checkpoint")
    history = None
    if job.mesh.rank == 0:
        job.run.save_metadata(job.identity, job.tokenizer, job.mesh.device, job.initial_weights)
        job.hooks.on_run(job.run, job.config, job.mesh.device, job.mesh.dims.world_size)
        history = read_lr_history(job.run.directory, progress.first_step)
    peak_lr, peak = job.recipe.train.optimizer.peak_lr, job.throughput.peak
    say_run(job.plan, job.model, peak_lr, chosen, peak.source, history)
