"""Every kernel of every operation against its reference, forward and gradient, on shapes that nobody chose."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.model.helpers import EXPERTS, make, some_tokens
from zero2all.base.errors import UsageError
from zero2all.base.torch_private import flash_attention_cpu_backward
from zero2all.model import IGNORE_INDEX, ModelInputs, Z2all, document_starts
from zero2all.model.ops import OPS, choose_kernels
from zero2all.model.ops import chunked_loss as chunked_loss_module
from zero2all.model.ops.attention import MaskInputs, attention_mask
from zero2all.model.ops.cross_entropy import HeadConfig
from zero2all.model.ops.document_attention import segments
from zero2all.recipe import ModelConfig, OpsRecipe

CPU = torch.device("cpu")
DTYPES = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
few = settings(max_examples=25, deadline=None, derandomize=True)
dtypes = st.sampled_from(list(DTYPES))


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_gradients(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """Outputs, and the gradients of the inputs for an uneven gradient of the outputs."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    torch.autograd.backward(outputs, [random(9, *out.shape, dtype=out.dtype) for out in outputs])
    return [out.detach() for out in outputs] + [x.grad for x in inputs if x.grad is not None]


def compare(op: str, kernels: tuple[str, str], inputs: list[Tensor], *rest: Any) -> list[list[Tensor]]:
    functions = [OPS[op][kernel].load() for kernel in kernels]
    return [with_gradients(lambda *given, f=function: f(*given, *rest), inputs) for function in functions]


def assert_close(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        scale = max(1.0, float(other.float().abs().max())) if other.numel() else 1.0
        torch.testing.assert_close(one.float(), other.float(), atol=tolerance * scale, rtol=tolerance)


@few
@given(dtypes, st.integers(1, 5), st.integers(1, 130), st.integers(0, 99))
def test_norm(dtype: torch.dtype, rows: int, size: int, seed: int) -> None:
    x, weight = random(seed, rows, 3, size, dtype=dtype), random(seed + 1, size)
    assert_close(*compare("norm", ("torch", "reference"), [x, weight], 1e-5), DTYPES[dtype])


@few
@given(dtypes, st.integers(1, 4), st.integers(1, 3), st.integers(1, 40), st.integers(1, 20), st.booleans())
def test_rope(dtype: torch.dtype, batch: int, heads: int, length: int, half: int, own_positions: bool) -> None:
    q, k = random(1, batch, 2 * heads, length, 2 * half, dtype=dtype), random(2, batch, heads, length, 2 * half)
    shape = (batch, 1, length, half) if own_positions else (length, half)
    angles = random(3, *shape).repeat_interleave(2, dim=-1)[..., torch.arange(2 * half).view(half, 2).T.flatten()]
    table = torch.stack([angles.cos(), angles.sin()])
    assert_close(*compare("rope", ("torch", "reference"), [q, k.to(dtype)], table), DTYPES[dtype])


@few
@given(dtypes, st.lists(st.integers(1, 33), min_size=1, max_size=3), st.integers(0, 99))
def test_swiglu(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    inputs = [random(seed, *shape, dtype=dtype), random(seed + 1, *shape, dtype=dtype)]
    assert_close(*compare("swiglu", ("torch", "reference"), inputs), DTYPES[dtype])


@st.composite
def losses(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, HeadConfig]:
    rows, size, vocab = draw(st.integers(1, 70)), draw(st.integers(1, 40)), draw(st.integers(1, 150))
    padding = draw(st.integers(0, 40))
    softcap, z_loss = draw(st.sampled_from([0.0, 4.0])), draw(st.sampled_from([0.0, 0.01]))
    targets = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    ignored = draw(st.sampled_from(["none", "some", "all"]))
    targets[:: {"none": rows + 1, "some": 3, "all": 1}[ignored]] = IGNORE_INDEX
    if ignored == "none":
        targets[0] = 0
    return random(1, rows, size), random(2, vocab + padding, size), targets, HeadConfig(vocab, softcap, z_loss)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss_module, "CHUNK_BYTES", 1)  # so that rows go in parts of 16


@pytest.mark.usefixtures("small_chunks")
def test_cross_entropy() -> None:
    @settings(few, max_examples=60)
    @given(losses(), dtypes, st.booleans())
    def check(case: tuple[Tensor, Tensor, Tensor, HeadConfig], dtype: torch.dtype, even: bool) -> None:
        x, weight, targets, head = case
        x, weight = x.to(dtype) * 0.5, (weight * 0.5).to(dtype).float()
        scale = torch.full(targets.shape, 0.1) if even else random(3, len(targets))
        found = {}
        for name, kernel in OPS["cross_entropy"].items():
            if name == "liger" or (name == "torch" and (head.softcap or head.z_loss)):
                continue
            a, w = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
            out = kernel.load()(a, w, targets, head)
            (out.sum() * 0.1 if even else (out * scale).sum()).backward()
            assert out.dtype == torch.float32
            assert not out[targets == IGNORE_INDEX].any()
            assert w.grad is not None
            assert not w.grad[head.vocab_size :].any()
            found[name] = [out.detach(), a.grad, w.grad]
        for name in found.keys() - {"reference"}:
            assert_close(found[name], found["reference"], DTYPES[dtype])

    check()


def test_even_losses_need_no_second_pass_and_none_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[bool] = []
    original = chunked_loss_module.chunked_forward_backward

    def watched(*args: Any) -> Any:
        passes.append(args[-1] is not None)
        return original(*args)

    monkeypatch.setattr(chunked_loss_module, "chunked_forward_backward", watched)
    x, weight, targets = random(1, 24, 8).requires_grad_(), random(2, 64, 8), torch.arange(24)
    loss = OPS["cross_entropy"]["chunked"].load()
    (loss(x, weight, targets, HeadConfig(64)).view(3, 8).sum() / 24).backward()
    assert passes == [True]
    loss(x, weight, targets, HeadConfig(64)).square().sum().backward()
    assert passes == [True] * 3
    with torch.no_grad():
        loss(x, weight, targets, HeadConfig(64))
    assert passes == [True, True, True, False]


@few
@given(dtypes, st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(1, 20), st.integers(1, 20))
def test_experts(dtype: torch.dtype, counts: list[int], size: int, width: int) -> None:
    """Some have no token at all."""
    total, experts = sum(counts), len(counts)
    inputs = [random(1, total, size, dtype=dtype)]
    inputs += [random(n, experts, *shape, dtype=dtype) for n, shape in ((2, (width, size)), (3, (width, size)))]
    inputs += [random(4, experts, size, width, dtype=dtype)]
    gate = OPS["swiglu"]["torch"].load()

    def apply(kernel: str) -> list[Tensor]:
        function = OPS["experts"][kernel].load()
        return with_gradients(lambda x, g, u, d: function(x, torch.tensor(counts), g, u, d, gate), inputs)

    assert_close(apply("grouped"), apply("reference"), 3 * DTYPES[dtype])


@st.composite
def packed(draw: st.DrawFn) -> tuple[Tensor | None, int, int | None]:
    """Where documents begin: with one-token documents, rows without a boundary, rows of nothing but padding."""
    length, rows = draw(st.integers(1, 60)), draw(st.integers(1, 3))
    window = draw(st.one_of(st.none(), st.integers(1, 70)))
    if draw(st.booleans()):
        return None, length, window
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    for row in tokens:
        kind = draw(st.sampled_from(["some", "none", "all"]))
        cuts = {"some": draw(st.lists(st.integers(0, length - 1), max_size=5)), "none": [], "all": range(length)}[kind]
        row[list(cuts)] = 1
    return document_starts(tokens == 1), length, window


@pytest.fixture(autouse=True)
def _flash_attn_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the package, which needs a GPU: the same calls by the reference, so that the arguments are tested."""

    def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
        assert causal
        assert window_size[1] == 0
        window = None if window_size[0] == -1 else window_size[0] + 1
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = attention_mask(None, q.shape[2], window, q.device)
        out: Tensor = OPS["attention"]["reference"].load().attend(q, k, v, mask)
        return out.transpose(1, 2)

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, of_keys: Tensor, max_seqlen: int, __: int, **more: Any
    ) -> Tensor:
        sizes = cu_seqlens.diff()
        assert torch.equal(cu_seqlens, of_keys)
        assert cu_seqlens.dtype == torch.int32
        assert int(sizes.max()) <= max_seqlen
        documents = [x.split(sizes.tolist()) for x in (q, k, v)]
        return torch.cat([dense(*(x[None] for x in part), **more)[0] for part in zip(*documents, strict=True)])

    fake = ModuleType("flash_attn")
    fake.flash_attn_func, fake.flash_attn_varlen_func = dense, varlen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", fake)


@pytest.mark.parametrize("kernel", ["sdpa", "flash"])
def test_attention(kernel: str) -> None:
    @settings(few, max_examples=60)
    @given(packed(), dtypes, st.sampled_from([(1, 1), (4, 2), (3, 1), (2, 2)]), st.sampled_from([2, 16, 40]))
    def check(
        case: tuple[Tensor | None, int, int | None], dtype: torch.dtype, heads: tuple[int, int], size: int
    ) -> None:
        starts, length, window = case
        batch = 2 if starts is None else len(starts)
        inputs = [
            random(n, batch, count, length, size, dtype=dtype) for n, count in enumerate((heads[0], *heads[1:] * 2))
        ]
        found = []
        for name in (kernel, "reference"):
            chosen = OPS["attention"][name].load()
            mask = chosen.mask_for(MaskInputs(starts, length, window, CPU))
            found.append(with_gradients(lambda q, k, v, f=chosen, p=mask: f.attend(q, k, v, p), inputs))
        assert_close(*found, DTYPES[dtype])

    check()


@pytest.mark.parametrize("limit", [39, 40])
@pytest.mark.parametrize("has_documents", [False, True])
def test_backward_in_bf16_is_computed_in_fp32_up_to_a_length(
    limit: int, has_documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the length alone, so that a resumed run computes the same; both sides are equal to the reference."""
    monkeypatch.setattr("zero2all.model.ops.attention.MAX_FP32_BACKWARD", limit)
    monkeypatch.setattr("zero2all.model.ops.document_attention.MAX_FP32_BACKWARD", limit)
    tokens = torch.zeros(2, 48, dtype=torch.int64)
    tokens[:, 8] = 1  # documents of 8 and 40
    length, starts = (48, document_starts(tokens == 1)) if has_documents else (40, None)
    inputs = [random(n, 2, heads, length, 16, dtype=torch.bfloat16) for n, heads in enumerate((4, 2, 2))]
    found, seen = [], set()

    def watched(grad: Tensor, *rest: Any, **more: Any) -> Any:
        seen.add(grad.dtype)
        return flash_attention_cpu_backward(grad, *rest, **more)

    monkeypatch.setattr("zero2all.model.ops.document_attention.flash_attention_cpu_backward", watched)
    for name in ("sdpa", "reference"):
        chosen = OPS["attention"][name].load()
        mask = chosen.mask_for(MaskInputs(starts, length, None, CPU))
        found.append(with_gradients(lambda q, k, v, f=chosen, p=mask: f.attend(q, k, v, p), inputs))
    assert_close(*found, DTYPES[torch.bfloat16])
    in_bf16 = {torch.bfloat16} if has_documents else set()  # plain rows are torch's own operation
    assert seen == ({torch.float32} if limit == 40 else in_bf16)


def test_no_segment_is_larger_than_it_has_to_be() -> None:
    """Work and memory grow with the documents and the window, not with the square of the row."""
    tokens = torch.zeros(1, 1000, dtype=torch.int64)
    tokens[0, [100, 101, 600]] = 1
    found = [(segment.rows.start, *segment[1:]) for segment in segments(document_starts(tokens == 1), 250)]
    assert found == [
        (0, 0, 0, 100),
        (0, 100, 100, 101),
        (0, 101, 101, 351),
        (0, 101, 351, 600),
        (0, 600, 600, 850),
        (0, 600, 850, 1000),
    ]


def test_a_kernel_for_gpus_may_be_named_on_the_meta_device() -> None:
    config = ModelConfig(vocab_size=320, ops=OpsRecipe(attention="flash", norm="liger"))
    with torch.device("meta"):
        model = Z2all(config)
    assert model.config.ops.attention == "flash"
    with pytest.raises(UsageError, match="cannot be used"):  # and is chosen, or refused, where it is to compute
        model.to_empty(device="cpu").init_buffers()


def test_auto_takes_what_runs_and_says_why_not_the_rest() -> None:
    ops = choose_kernels(ModelConfig(vocab_size=320), CPU)
    assert {choice.op: choice.form for choice in ops.choices} == {
        "attention": "sdpa",
        "norm": "torch",
        "rope": "torch",
        "swiglu": "torch",
        "cross_entropy": "chunked",
        "experts": "grouped",
    }
    assert ops["attention"].others["flash"] == "runs on CUDA devices, not on cpu"
    assert ops["norm"].others["reference"] == "torch comes first"
    assert "sdpa" in str(ops["attention"])


def test_a_kernel_that_cannot_run_is_refused_with_a_way_out() -> None:
    for changes, reason in [
        ({"attention": "flash"}, r"model\.ops\.attention=flash cannot be used: runs on CUDA.*try model\.ops"),
        ({"norm": "liger"}, "runs on CUDA"),
        ({"cross_entropy": "torch"}, "no soft-cap"),
    ]:
        config = ModelConfig.model_validate({"vocab_size": 320, "z_loss": 1e-4, "ops": changes})
        with pytest.raises(UsageError, match=reason):
            choose_kernels(config, CPU)
    missing = OPS["norm"]["liger"].unavailable_reason(torch.device("cuda"), ModelConfig(vocab_size=320))
    assert missing in (None, "liger_kernel is not installed")


def test_torch_counts_our_operations_as_it_does_the_plain_ones() -> None:
    """A training pass through the kernels that it cannot look into, beside one of the references."""

    def counted(**kernels: str) -> int:
        model = make(moe=EXPERTS, ops=kernels).train()
        tokens = some_tokens()
        starts = document_starts(tokens == 7)
        with FlopCounterMode(display=False) as counter:
            model(ModelInputs(tokens, targets_BS=tokens, doc_starts_BS=starts)).sum().backward()
        return int(counter.get_total_flops())

    plain = counted(attention="reference", cross_entropy="reference", experts="reference")
    again = 2 * 3 * 2 * 4 * 40 * 40 * 16  # fused attention computes its scores once more: layers, rows, heads
    assert counted() == pytest.approx(plain + again, rel=0.01)


def test_nothing_optional_is_imported_before_it_is_chosen() -> None:
    code = "import sys, zero2all.model; print([n for n in ('liger_kernel', 'flash_attn') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_of_a_norm_has_the_type_of_its_input(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch's CUDA kernel, which keeps the input and one number a row, is not used."""
    types: list[tuple[torch.dtype, torch.dtype]] = []
    rms_norm = torch.nn.functional.rms_norm

    def recorded(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        types.append((x.dtype, weight.dtype))
        return rms_norm(x, shape, weight, eps)

    monkeypatch.setattr(torch.nn.functional, "rms_norm", recorded)
    OPS["norm"]["torch"].load()(torch.randn(3, 8, dtype=dtype, device="meta"), torch.ones(8, device="meta"), 1e-5)
    assert types == [(dtype, dtype)]
