"""Runs a few steps of a recipe in a directory of its own and measures them."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from torch.profiler import profile

from zero2all.base.errors import Interrupted, UsageError
from zero2all.base.io import write_json, write_text
from zero2all.base.machine.devices import peak_at_least, synchronize
from zero2all.base.records import to_json
from zero2all.base.units import Duration
from zero2all.bench.profile.memory import MemoryTracker, cuda_memory_history
from zero2all.bench.profile.operators import TRACE_FILES, flop_counter, list_operators, start_profiler, write_trace
from zero2all.bench.profile.report import SHOWN_OPERATORS, Profile, RankTimes, format_profile, mean_time, suggest
from zero2all.recipe import Recipe
from zero2all.train import Trainer, TrainerHooks
from zero2all.train.data_loader import Batch
from zero2all.train.step_timer import PARTS, StepTime

WARMUP_STEPS = 2  # with the first update, which allocates the state of the optimizer
MAX_TRACED_STEPS = 2  # a trace of many steps is slow to open
PROFILE_FILE, SUMMARY_FILE, OPERATORS_FILE, MEMORY_FILE, CUDA_FILE = (
    "profile.json", "summary.txt", "operators.json", "memory.json", "cuda-memory.pickle",
)  # fmt: skip
RUN = "profiled-run"  # removed at the end: no run of a user has this name
OWN_NAMES = {PROFILE_FILE, SUMMARY_FILE, OPERATORS_FILE, MEMORY_FILE, CUDA_FILE, *TRACE_FILES, RUN}
NEVER = Duration(10**12, "steps")


class ProfileDone(Interrupted):
    """Ends a training run after the steps that are measured."""


def profile_recipe(recipe: Recipe, steps: int, out: Path | None = None) -> Profile | None:
    """Train ``steps`` timed steps of a new run, and a few more under the profiler; None on ranks other than 0.

    The run is in ``out``, by default ``<out>/profile`` of the recipe, and is removed at the end. Existing runs of the
    recipe and their checkpoints are neither read nor written. Every rank calls it.
    """
    directory = out or recipe.out / "profile"
    if directory.exists() and {path.name for path in directory.iterdir()} - OWN_NAMES:
        raise UsageError(f"{directory} holds something else than a profile: give an empty directory with --out")
    return ProfiledRun(recipe, steps, directory).measure()


def run_recipe(recipe: Recipe, directory: Path) -> Recipe:
    """The recipe of the run that is measured: the same data, model and parallel layout; nothing is saved."""
    return recipe.model_copy(
        update={
            "out": directory,
            "run": RUN,
            "corpus": recipe.corpus.model_copy(update={"dir": recipe.documents_dir}),
            "tokenizer": recipe.tokenizer.model_copy(update={"dir": recipe.tokenizer_dir}),
            "tokens": recipe.tokens.model_copy(update={"dir": recipe.tokens_dir}),
            "checkpoint": recipe.checkpoint.model_copy(
                update={"every": NEVER, "flash_every": None, "keep_every": None, "dir": None}
            ),
            "evals": recipe.evals.model_copy(update={"every": None}),
            "track": recipe.track.model_copy(update={"sinks": []}),
        }
    )


@dataclass(frozen=True)
class ProfileSteps:
    """The steps in order: warm-up, timed, traced, one with FLOPs counted, one with memory tracked.

    They are apart because each tool slows a step down.
    """

    timed: int

    @property
    def traced(self) -> int:
        """The number of traced steps."""
        return min(self.timed, MAX_TRACED_STEPS)

    @property
    def first_traced(self) -> int:
        return WARMUP_STEPS + self.timed

    @property
    def counted(self) -> int:
        return self.first_traced + self.traced

    @property
    def tracked(self) -> int:
        return self.counted + 1

    @property
    def end(self) -> int:
        return self.tracked + 1


class ProfiledRun:
    """A training run that is measured on rank 0. Other ranks only take part."""

    def __init__(self, recipe: Recipe, steps: int, directory: Path) -> None:
        self.recipe, self.steps, self.directory = run_recipe(recipe, directory), ProfileSteps(steps), directory
        self.times: list[StepTime] = []
        self.profiler: profile | None = None
        self.counter = flop_counter()
        self.tracker: MemoryTracker | None = None
        self.ranks: list[StepTime] = []
        self._active = ExitStack()  # the tools of the current step
        self._is_rank0 = False  # known when the process group is up

    def measure(self) -> Profile | None:
        hooks = TrainerHooks(on_start=self._on_start, on_batch=self._on_batch, on_step=self._on_step)
        try:
            with Trainer(self.recipe, hooks) as self.trainer, self._active:
                total = self.trainer.job.plan.total_steps
                if total <= self.steps.end:
                    raise UsageError(
                        f"the recipe has {total} steps, and --steps {self.steps.timed} needs {self.steps.end + 1}: "
                        "raise train.steps or lower --steps"
                    )
                with suppress(ProfileDone):
                    self.trainer.train()
                # When all ranks have closed their records, rank 0 removes them.
                self.ranks = self.trainer.job.ranks.scatter(
                    lambda: mean_time(self.times), lambda times: [times, *[[]] * (len(times) - 1)]
                )
        finally:
            self._remove_run()
        return self._write() if self._is_rank0 else None

    def _on_start(self) -> None:
        """Every rank waits for rank 0 before it writes to the run."""
        self._is_rank0 = not dist.is_initialized() or dist.get_rank() == 0
        self._remove_run()  # of a profile that was killed

    def _remove_run(self) -> None:
        if self._is_rank0:
            shutil.rmtree(self.recipe.run_dir, ignore_errors=True)

    def _on_step(self, step: int, time: StepTime) -> None:
        if WARMUP_STEPS <= step < self.steps.first_traced:
            self.times.append(time)

    def _on_batch(self, batch: Batch) -> None:
        """Stop the tool of the previous step and start the one for this step."""
        trainer = self.trainer
        if batch.step not in (self.steps.first_traced, self.steps.counted, self.steps.tracked, self.steps.end):
            return
        synchronize(trainer.job.mesh.device)
        self._active.close()
        if batch.step in (self.steps.counted, self.steps.tracked):  # neither sees inside of compiled blocks
            self._active.enter_context(trainer.job.model.eager_blocks())
        if batch.step == self.steps.end:
            raise ProfileDone("the profile is complete")
        if self._is_rank0:
            self._start_tool(batch.step)

    def _start_tool(self, step: int) -> None:
        trainer = self.trainer
        if step == self.steps.first_traced:
            self.profiler = start_profiler(trainer.job.mesh.device)
            self._active.callback(self.profiler.stop)
        elif step == self.steps.counted:
            self._active.enter_context(self.counter)
        else:
            if trainer.job.mesh.device.type == "cuda":
                self._active.enter_context(cuda_memory_history(str(self.directory / CUDA_FILE)))
            self.tracker = MemoryTracker(trainer.job.model, trainer.job.optimizers, trainer.timer)
            self._active.enter_context(self.tracker)

    def _write(self) -> Profile:
        assert self.profiler is not None
        assert self.tracker is not None
        trainer, times, memory = self.trainer, RankTimes(self.ranks), self.tracker.timeline()
        device = trainer.job.mesh.device
        flops = float(self.counter.get_total_flops())
        peak = peak_at_least(flops / times.seconds, trainer.job.throughput.peak, device, trainer.job.model.dtype)
        operators = list_operators(self.profiler, self.counter, self.steps.traced, device, peak.flops)
        stage = trainer.job.plan.stage_of(WARMUP_STEPS)
        start, stop = stage.sample_range(WARMUP_STEPS)
        profile = Profile(
            directory=str(self.directory),
            steps=self.steps.timed,
            step_seconds=times.seconds,
            shares={part: times.share(part) for part in PARTS},
            ranks=times.ranks,
            tokens_per_second=(stop - start) * stage.recipe.seq_len / times.seconds,
            flops=flops,
            flops_share=flops / times.seconds / peak.flops,
            peak=peak.source,
            operators=operators[:SHOWN_OPERATORS],
            memory=memory.peak,
            suggestions=suggest(times, self.recipe),
            trace=str(write_trace(self.profiler, self.directory)),
        )
        write_json(self.directory / OPERATORS_FILE, {"operators": [asdict(operator) for operator in operators]})
        write_json(self.directory / MEMORY_FILE, to_json(memory))
        write_text(self.directory / SUMMARY_FILE, format_profile(profile) + "\n")
        write_json(self.directory / PROFILE_FILE, to_json(profile))
        return profile
