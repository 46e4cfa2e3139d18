"""What is evaluated: a run, a checkpoint of a run, or a Hugging Face directory."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import read_json_object
from zero2all.base.machine.devices import pick_device
from zero2all.base.workspace import IDENTITY_FILE, find_runs_below
from zero2all.checkpoint.checkpoint_directory import checkpoint_step
from zero2all.checkpoint.inspection import CheckpointWeights
from zero2all.model import HFWeights, Z2all, load_model
from zero2all.model.hf_weights import CONFIG, read_hf_config
from zero2all.model.weights import GrownVocabulary, MergedAdapters
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.recipe import ParallelRecipe, TrainRecipe
from zero2all.recipe.parallel import parallel_mistakes
from zero2all.tokenizer import Tokenizer
from zero2all.train import Run


@dataclass(frozen=True)
class EvalTarget:
    """A model to evaluate."""

    model: Z2all
    """In eval mode and fp32, on the GPU if there is one."""
    tokenizer: Tokenizer
    name: str
    """The path as it was given."""
    step: int | None
    """The number of steps that a checkpoint was trained for; None for a Hugging Face directory."""
    directory: Path
    """The directory of the run, or the Hugging Face directory."""


@dataclass(frozen=True)
class TargetLocation:
    """Where a model is; its weights are not read yet."""

    name: str
    directory: Path
    tokenizer: Tokenizer
    run: Run | None
    """None for a Hugging Face directory."""
    step: int | None

    def load_model(self) -> Z2all:
        device = pick_device("auto")
        if self.run is not None:
            return self.run.load_model(self.step).to(device)
        return load_model(self._open_hf(), device)

    def load_merged_model(self) -> Z2all:
        """The same with adapters (``model.lora``) merged, so that none are left."""
        if self.run is None or self.step is None:
            return self.load_model()
        weights = CheckpointWeights(self.run.checkpoints.path(self.step))
        if weights.config.lora is None:
            return self.load_model()
        return load_model(MergedAdapters(weights), pick_device("auto"))

    def load_parallel_model(self, parallel: ParallelRecipe) -> ParallelModel:
        """The model over ranks that ``z2a launch`` has started."""
        if self.run is not None:
            return self.run.load_parallel_model(parallel, self.step)
        for mistake in parallel_mistakes(read_hf_config(self.directory), TrainRecipe(steps=1), parallel):
            raise UsageError(mistake.message)
        mesh = ParallelMesh.init_distributed(parallel, pick_device("auto"))
        weights = self._open_hf(mesh.rank, mesh.dims.world_size)
        model = ParallelModel(weights.config, parallel, mesh, seed=0)
        model.load_weights(GrownVocabulary(weights, weights.config, {}))
        return model

    def _open_hf(self, rank: int = 0, world_size: int = 1) -> HFWeights:
        """The weights, after this rank's share of the files was compared with the checksums of an export."""
        weights = HFWeights(self.directory)
        weights.checksums(rank, world_size)
        return weights


def open_target(text: str, step: int | None = None) -> EvalTarget:
    """Load what is named on a command line: RUN, CHECKPOINT or HF_DIR. ``step`` selects a run's checkpoint.

    >>> target = open_target("runs/first", step=400)
    >>> target = open_target("Qwen3-0.6B")
    """
    found = find_target(text, step)
    return EvalTarget(found.load_model(), found.tokenizer, found.name, found.step, found.directory)


def find_target(text: str, step: int | None = None) -> TargetLocation:
    """Where it is, with its tokenizer. Raises if it is nothing that can be evaluated, and says why."""
    path, name = Path(text), str(Path(text))
    if (path / CONFIG).exists():
        if step is not None:
            raise UsageError(f"--step is for the checkpoints of a run; {path} is a Hugging Face directory")
        return TargetLocation(name, path, _hf_tokenizer(path), None, None)
    saved = checkpoint_step(path.name)
    if saved is not None:
        if step is not None:
            raise UsageError(f"{path} is one checkpoint: give the directory of the run with --step")
        run, step = _run_of_checkpoint(path, saved), saved
    elif find_runs_below(path):
        run = Run.open(path)
    else:
        raise UsageError(
            f"{path} is not the directory of a run, of a checkpoint of a run (such as step-00000400) or of a Hugging "
            f"Face model ({CONFIG} and *.safetensors)"
        )
    return TargetLocation(name, run.directory, run.tokenizer(), run, run.valid_step(step))


def _run_of_checkpoint(path: Path, step: int) -> Run:
    directory = path.absolute().parent.parent
    if (directory / IDENTITY_FILE).exists():
        run = Run.open(directory)
        if run.checkpoints.path(step).resolve() == path.resolve():
            return run
    raise UsageError(
        f"the run of the checkpoint {path}, which has its tokenizer, is not above it: give the directory of the run, "
        f"with --step {step}"
    )


def _hf_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in a Hugging Face directory, also of sentencepiece, which must fit the vocabulary of the model."""
    from zero2all.tokenizer.import_export import import_tokenizer

    if (directory / "tokenizer.json").exists():
        tokenizer = Tokenizer(directory)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            import_tokenizer(directory, Path(temporary) / "tokenizer")
            tokenizer = Tokenizer(Path(temporary) / "tokenizer")
    rows = read_json_object(directory / CONFIG).get("vocab_size")
    if isinstance(rows, int) and tokenizer.vocab_size > rows:
        raise Z2aError(
            f"the tokenizer in {directory} has {tokenizer.vocab_size} tokens, and the model {rows} rows: it is the "
            "tokenizer of another model"
        )
    return tokenizer
