"""Float8 by torchao, emulated: what is converted, how far losses and gradients are from those without, and over ranks.

Bounds: losses of ten steps within 0.01 (measured 0.0034), the first gradient with a cosine of 0.998 (0.9993).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.parallel.helpers import CPU, gradients, make_model, small_config
from tests.ranks import on_ranks
from zero2all.base.errors import RecipeError, UsageError
from zero2all.model import ModelInputs
from zero2all.model.moe import MoE
from zero2all.parallel import ParallelModel
from zero2all.parallel.float8 import check_float8
from zero2all.recipe import parse_recipe
from zero2all.recipe.training import Float8Scaling

pytest.importorskip("torchao", reason="torchao is not installed (extra quant)")

CUDA = torch.device("cuda")
SAMPLES, LENGTH = 4, 62  # 62 tokens a sample: the products are padded


def build(float8: Float8Scaling | None, dtype: torch.dtype = torch.float32, **changes: object) -> ParallelModel:
    config = small_config(hidden_size=64, intermediate_size=128, max_position_embeddings=64, vocab_size=320, **changes)
    return make_model({}, config, dtype=dtype, float8=float8)


def train(float8: Float8Scaling | None, dtype: torch.dtype, steps: int) -> tuple[list[float], Tensor]:
    """The loss of each step, and the first gradient."""
    model = build(float8, dtype)
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=1e-3)
    tokens = torch.randint(320, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    first, last = model.mesh.sample_range(SAMPLES)
    losses, gradient = [], torch.empty(0)
    for _ in range(steps):
        found = model.forward_backward(
            ModelInputs(tokens[first:last, :-1], tokens[first:last, 1:]), divisor=SAMPLES * LENGTH
        )
        if not losses:
            gradient = torch.cat([grad.flatten() for grad in gradients(model).values()])
        losses.append(model.all_reduce_sum(found.sum()).item() / (SAMPLES * LENGTH))
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_near_those_without(dtype: torch.dtype) -> None:
    losses, gradient = train(None, dtype, steps=10)
    scalings: tuple[Float8Scaling, ...] = ("tensorwise", "rowwise")
    for scaling in scalings:
        found, rounded = train(scaling, dtype, steps=10)
        assert found != losses, "nothing was rounded"
        assert found == pytest.approx(losses, abs=0.01)
        assert torch.cosine_similarity(rounded, gradient, dim=0) > 0.998


def train_both() -> list[tuple[list[float], Tensor]]:
    return [train("tensorwise", torch.float32, 3), train("rowwise", torch.float32, 3)]


def test_over_ranks_it_is_as_in_one_process() -> None:
    """Rows of a batch scale by themselves only if rowwise; tensorwise, each rank scales its own samples."""
    alone = train_both()
    (tensorwise, rowwise), (_, again) = on_ranks(2, train_both)
    assert rowwise[0] == again[0]
    assert rowwise[0] == pytest.approx(alone[1][0], abs=2e-3)
    assert tensorwise[0] == pytest.approx(alone[0][0], abs=2e-3)
    assert rowwise[0][0] == pytest.approx(alone[1][0][0], abs=5e-6)


def test_only_plain_matrices_of_blocks_are_converted() -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
    model = build("tensorwise", moe=moe).model
    block = model.layers[0]
    assert isinstance(block.mlp, MoE)
    assert block.mlp.shared_experts is not None
    kinds = {
        "q": block.self_attn.q_proj,
        "router": block.mlp.gate,
        "head": model.lm_head,
        "24 is no multiple of 16": block.mlp.shared_experts.up_proj,
    }
    converted = {name for name, part in kinds.items() if type(part).__name__ == "Float8Linear"}
    assert converted == {"q"}
    plain = build(None, moe=moe).model
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.tp=2"], "not converted to float8: set parallel.tp=1"),
        (["train.precision=fp16"], "set train.precision=bf16"),
        (["model.lora={rank: 4}", "train.init=x"], "matrices with adapters"),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe("{train: {steps: 1, float8: rowwise}}", overrides)


def test_devices_without_float8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_float8(CPU, torch.float32, compile=False)
    with pytest.raises(UsageError, match=r"or set train\.compile=false to emulate it"):
        check_float8(CPU, torch.float32, compile=True)
    with pytest.raises(UsageError, match=r"needs a CUDA GPU; on mps remove it$"):
        check_float8(torch.device("mps"), torch.float32, compile=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UsageError, match="A100 has no float8"):
        check_float8(CUDA, torch.bfloat16, compile=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_float8(CUDA, torch.bfloat16, compile=True)
    with pytest.raises(UsageError, match="rounds from bf16"):
        check_float8(CUDA, torch.float32, compile=True)
