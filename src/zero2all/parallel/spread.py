"""A model laid over ranks, behind a face that is the same for every layout."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from zero2all.errors import UsageError
from zero2all.model import Z2all
from zero2all.parallel.activations import apply_checkpointing
from zero2all.parallel.initialize import WholeFill
from zero2all.parallel.layout import Layout
from zero2all.parallel.pipeline import Pipeline, Stage, cut, joined, layer_costs, split_layers, stage_numbers
from zero2all.parallel.shards import apply_sharding
from zero2all.parallel.tensor import apply_tensor_parallel
from zero2all.recipe import ModelConfig, ParallelRecipe


class Spread:
    """
    >>> layout = Layout.start(recipe.parallel, torch.device("cpu"))
    >>> spread = Spread(config, recipe.parallel, layout, seed=0)
    >>> optimizer = torch.optim.AdamW(spread.model.parameters())
    >>> losses = spread.backward(tokens, divisor=targets_in_the_whole_batch)  # of this rank's samples
    >>> norm = spread.clip(1.0)
    >>> optimizer.step(); optimizer.zero_grad()
    >>> loss = spread.total(losses.sum()) / targets_in_the_whole_batch
    """

    model: Z2all
    """What this rank holds, under the names of the whole model: for optimizers and DCP's ``get_state_dict``."""

    def __init__(
        self,
        config: ModelConfig,
        recipe: ParallelRecipe,
        layout: Layout,
        *,
        seed: int,
        bf16: bool = False,
        compile: bool = False,
        micro_samples: int | None = None,
    ) -> None:
        """Build on the meta device, lay over the ranks, fill with the weights that the whole model would have.

        ``micro_samples`` is how many samples a rank takes in one forward pass; all of its own if not given.
        """
        self.config, self.recipe, self.layout, self.bf16, self.micro_samples = config, recipe, layout, bf16, micro_samples
        self._pipeline: Pipeline | None = None
        self._ddp: DistributedDataParallel | None = None
        with torch.device("meta"):
            parts = self._parts()
        for part in parts:
            if layout.sizes.tp > 1:
                apply_tensor_parallel(part, layout.mesh("tp"), recipe.sp, recipe.loss_parallel)
            apply_checkpointing(part.layers, recipe)
            if compile:
                for block in part.layers.children():
                    block.compile()
        roots: list[nn.Module] = [Stage(part) for part in parts] if layout.sizes.pp > 1 else list(parts)
        self._sharded = self._shard(roots, parts)
        for part in parts:
            part.to_empty(device=layout.device)
            with WholeFill():
                part.init_weights(seed)
        with torch.device("meta"):
            self.model = joined(config, parts)
        if layout.sizes.pp > 1:
            stages = [root for root in roots if isinstance(root, Stage)]
            self._pipeline = Pipeline(stages, stage_numbers(recipe, layout.at("pp")), recipe, layout)
        elif layout.sizes.dp > 1 and not self._sharded:
            self._ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    def backward(self, tokens_BT: Tensor, divisor: float) -> Tensor:
        """Add the gradient of ``losses.sum() / divisor`` over all ranks, from this rank's samples [B, S + 1].

        ``divisor`` is the number of targets in the whole batch. Returns this rank's losses [B, S], zero where another
        rank has them (other pipeline stages, other parts of a sequence); see ``total``.
        """
        tokens_BT = tokens_BT.to(self.layout.device, non_blocking=True)
        inputs = {"tokens_BS": tokens_BT[:, :-1].contiguous(), "targets_BS": tokens_BT[:, 1:].contiguous()}
        with self._contexts():
            if self._pipeline is not None:
                losses = self._backward_in_pipeline(self._pipeline, inputs, divisor)
            else:
                losses = self._backward_in_turn(inputs, divisor)
        self._finish_gradients()
        return losses

    def _backward_in_turn(self, inputs: dict[str, Tensor], divisor: float) -> Tensor:
        samples = inputs["tokens_BS"].shape[0]
        size = self.micro_samples or samples
        run: nn.Module = self._ddp or self.model
        # DDP takes the mean over ranks of what is meant to be added up.
        scale = (self.layout.sizes.dp if self._ddp is not None else 1) / divisor
        found: list[Tensor] = []
        for first in range(0, samples, size):
            piece = {name: tensor[first : first + size] for name, tensor in inputs.items()}
            with self._synchronised(first + size >= samples):
                losses = _local(run(**piece))
                (losses.sum() * scale).backward()
            found.append(losses.detach())
        return torch.cat(found)

    def _backward_in_pipeline(self, pipeline: Pipeline, inputs: dict[str, Tensor], divisor: float) -> Tensor:
        samples, length = inputs["tokens_BS"].shape
        size = self.micro_samples or _pieces(samples, 2 * pipeline.count)
        if samples % size:
            raise UsageError(
                f"a rank's {samples} samples do not divide into micro-batches of {size}: change train.micro_batch_tokens"
            )
        cuts = self.layout.sizes.tp if self.recipe.sp else 1
        dtype = torch.bfloat16 if self.bf16 and not self.config.residual_fp32 else torch.float32
        stream = torch.empty(size, length // cuts, self.config.hidden_size, dtype=dtype, device="meta")
        losses = pipeline.backward(inputs, samples // size, divisor, stream)
        return torch.zeros(samples, length, device=self.layout.device) if losses is None else _local(losses).detach()

    def clip(self, longest: float) -> Tensor:
        """Scale the gradient so that its norm over all parameters of all ranks is at most ``longest``; the norm before.

        A shard that several ranks hold counts once. One collective, whatever the layout.
        """
        gradients = [(parameter, parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self.layout.device)
        for parameter, gradient in gradients:
            square += torch.linalg.vector_norm(_local(gradient), dtype=torch.float64) ** 2 / self._holders(parameter)
        if self.layout.sizes.world > 1:
            dist.all_reduce(square)
        norm = square.sqrt().float()
        scale = torch.clamp(longest / (norm + 1e-6), max=1.0)
        torch._foreach_mul_([_local(gradient) for _, gradient in gradients], scale)
        return norm

    def total(self, known: Tensor) -> Tensor:
        """The sum over ranks of something computed from this rank's ``losses``, each token counted once."""
        known = known.clone() if self._speaks else torch.zeros_like(known)
        if self.layout.sizes.world > 1:
            dist.all_reduce(known)
        return known

    @property
    def _speaks(self) -> bool:
        """Whether this rank's losses count: tp ranks repeat them, and early stages have none."""
        return self.layout.at("tp") == 0 and (self._pipeline is None or self._pipeline.has_last)

    def close(self) -> None:
        self.layout.close()

    def _parts(self) -> list[Z2all]:
        """The model, or this rank's stages of it."""
        sizes = self.layout.sizes
        if sizes.pp == 1:
            return [Z2all(self.config)]
        split = split_layers(layer_costs(self.config), sizes.pp * self.recipe.stages_per_rank)
        numbers = stage_numbers(self.recipe, self.layout.at("pp"))
        return [cut(self.config, split[number], number == 0, number == len(split) - 1) for number in numbers]

    def _shard(self, roots: list[nn.Module], parts: list[Z2all]) -> bool:
        """FSDP2 wherever ranks share or must add up parameters; plain copies of a whole model are left to DDP."""
        sizes = self.layout.sizes
        only_copies = sizes.dp_replicate == sizes.world
        if only_copies or sizes.dp * sizes.cp == 1:
            return False
        mesh = self.layout.shard_mesh()
        for root, part in zip(roots, parts, strict=True):
            apply_sharding(root, part.layers, mesh, self.recipe, self.bf16)
        return True

    def _contexts(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(
            torch.autocast(self.layout.device.type, dtype=torch.bfloat16, enabled=self.bf16 and not self._sharded)
        )
        if self.layout.sizes.tp > 1 and self.recipe.loss_parallel:
            from torch.distributed.tensor.parallel import loss_parallel

            stack.enter_context(loss_parallel())
        return stack

    def _synchronised(self, last: bool) -> AbstractContextManager[None]:
        """Gradients travel once a step, with the last micro-batch."""
        if self._ddp is not None and not last:
            return self._ddp.no_sync()
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def _finish_gradients(self) -> None:
        """Gradients that tensor parallelism left as partial sums become whole."""
        for parameter in self.model.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                if gradient.placements != parameter.placements:
                    parameter.grad = gradient.redistribute(placements=parameter.placements)

    def _holders(self, parameter: Tensor) -> int:
        """How many ranks hold the same shard of a parameter."""
        ranks = self.layout.sizes.world // self.layout.sizes.pp
        if not isinstance(parameter, DTensor):
            return ranks
        shards = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        return ranks // math.prod(size for size, placement in shards if not placement.is_replicate())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _pieces(samples: int, wanted: int) -> int:
    """Samples in a micro-batch, so that there are ``wanted`` of them, or the next fewer that come out even."""
    return next(samples // count for count in range(min(wanted, samples), 0, -1) if samples % count == 0)
