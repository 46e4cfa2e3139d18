"""What a checkpoint costs a training step: the stall of a flash checkpoint, and steps while one is being written.

    python -m benchmarks checkpoint_stall --out bench

Measured in turns, so that a machine that is busy for a while is busy for all: a flash checkpoint, a bare copy of the
same bytes to memory that is there already, a synchronous torch.save of the same state with fsync; then steps with and
without a durable checkpoint being written in the background. Medians count.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import benchmark_parser, show, show_json, wall_seconds

from zero2all.bench.checkpoint import blank_training_state
from zero2all.bench.measurements import write_report
from zero2all.checkpoint import (
    SHM_DIRECTORY,
    CheckpointCallbacks,
    CheckpointedModel,
    CheckpointManager,
    CheckpointPlaces,
    CheckpointStore,
    RankGroup,
)
from zero2all.checkpoint.state_dict import flatten_tensors, training_state_dict
from zero2all.model import Z2all
from zero2all.recipe import load_recipe_or_preset


class Trained:
    """A model with Adam state, and a step of it."""

    def __init__(self, preset: str, samples: int, length: int) -> None:
        config = load_recipe_or_preset(preset).model.model_copy(update={"vocab_size": 8192})
        self.model = Z2all(config).init_weights(0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        tokens = torch.randint(0, 8192, (samples, length + 1), generator=torch.Generator().manual_seed(0))
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:]
        self.step()

    def step(self) -> float:
        begin = time.perf_counter()
        self.model(self.inputs, targets_BS=self.targets).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin


def stalls(trained: Trained, directory: Path, memory: Path, rounds: int) -> dict[str, Any]:
    places = CheckpointPlaces(CheckpointStore(directory), directory, memory)
    manager = CheckpointManager(places, CheckpointedModel(trained.model, [trained.optimizer]), RankGroup())
    state = training_state_dict(trained.model, [trained.optimizer])
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in flatten_tensors(state))
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    found: dict[str, list[float]] = {"flash": [], "memcpy": [], "torch_save": []}
    for step in range(1, rounds + 2):
        flash = manager.save(step, blank_training_state(), durable=False)
        manager.wait_until_saved()  # the checksum is computed off the training path, but must not disturb the next time
        copied = wall_seconds(target.copy_, source)
        saved = wall_seconds(save_synchronously, state, directory / "sync.pt")
        if step > 1:  # the first makes the slots
            for name, seconds in (("flash", flash), ("memcpy", copied), ("torch_save", saved)):
                found[name].append(seconds)
    manager.close("finished")
    middle = {name: statistics.median(seconds) for name, seconds in found.items()}
    return {
        "bytes": size,
        "seconds": middle,
        "flash_to_memcpy": middle["flash"] / middle["memcpy"],
        "torch_save_to_flash": middle["torch_save"] / middle["flash"],
    }


def save_synchronously(state: Any, path: Path) -> None:
    with open(path, "wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


def while_writing(trained: Trained, directory: Path, memory: Path, rounds: int) -> dict[str, Any]:
    """Steps while a checkpoint is being written against steps just before; the stall itself is not in them."""
    written: list[float] = []
    manager = CheckpointManager(
        CheckpointPlaces(CheckpointStore(directory), directory, memory),
        CheckpointedModel(trained.model, [trained.optimizer]),
        RankGroup(),
        CheckpointCallbacks(on_saved=lambda step, seconds: written.append(seconds)),
    )
    manager.save(0, blank_training_state(), durable=True)
    manager.wait_until_saved()
    alone, beside = [], []
    for turn in range(1, rounds + 1):
        alone += [trained.step() for _ in range(3)]
        manager.save(turn, blank_training_state(), durable=True)
        while len(written) <= turn:
            beside.append(trained.step())
        manager.wait_until_saved()
    manager.close("finished")
    quiet, busy = statistics.median(alone), statistics.median(beside)
    return {
        "step_seconds": quiet,
        "step_seconds_while_writing": busy,
        "slower": busy / quiet - 1,
        "write_seconds": statistics.median(written[1:]),
        "steps_while_writing": len(beside),
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--preset", default="z2all-25m")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="Where durable checkpoints go; not a tmpfs.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    trained = Trained(options.preset, options.samples, options.length)
    with (
        tempfile.TemporaryDirectory(dir=options.disk) as disk,
        tempfile.TemporaryDirectory(dir=SHM_DIRECTORY, prefix="z2a-bench-") as memory,
    ):
        report = {
            "preset": options.preset,
            "parameters": sum(parameter.numel() for parameter in trained.model.parameters()),
            "threads": options.threads,
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "stall": stalls(trained, Path(disk), Path(memory) / "one", options.rounds),
            "persist": while_writing(trained, Path(disk), Path(memory) / "two", options.rounds),
        }
    text = markdown(report)
    if options.out is not None:
        write_report(options.out, "checkpoint-stall", report, text)
    show(text)
    show_json(report)


def markdown(report: dict[str, Any]) -> str:
    stall, persist = report["stall"], report["persist"]
    ms = {name: f"{1000 * seconds:.1f}" for name, seconds in stall["seconds"].items()}
    return "\n".join(
        [
            f"{report['preset']}: {report['parameters']:,} parameters, {stall['bytes'] / 1e6:.0f} MB of state, "
            f"{report['threads']} threads on {report['cores']} cores, load {report['load']:.1f}",
            "",
            "| | ms | |",
            "|---|---|---|",
            f"| stall of a flash checkpoint | {ms['flash']} | |",
            f"| bare copy of the same bytes | {ms['memcpy']} | flash is {stall['flash_to_memcpy']:.2f}x |",
            f"| torch.save with fsync | {ms['torch_save']} | {stall['torch_save_to_flash']:.1f}x flash |",
            f"| step | {1000 * persist['step_seconds']:.1f} | |",
            f"| step while a checkpoint is written | {1000 * persist['step_seconds_while_writing']:.1f} | "
            f"{100 * persist['slower']:+.1f}%, {persist['steps_while_writing']} steps, "
            f"{persist['write_seconds']:.1f} s a write |",
        ]
    )
