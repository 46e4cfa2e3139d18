"""Every private API of torch that zero2all uses, under a public name. No other module uses a private name of torch.

Each says what it is for, the torch version in which it was tested, and the public replacement if there is one.
``tests/base/test_torch_private.py`` checks that all are there with the signatures relied on. Run it with a new torch
first.
Only what ``import torch`` loads anyway, or in milliseconds, is imported at the top.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# Key-value stores of process groups, and torch's debug level. Tested with 2.13. Public as torch.distributed.Store and
# so on, where type checkers do not see them.
from torch._C._distributed_c10d import DebugLevel as DebugLevel
from torch._C._distributed_c10d import FileStore as FileStore
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import ProcessGroupGloo as _ProcessGroupGloo
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._C._distributed_c10d import set_debug_level as set_debug_level
from torch.distributed._functional_collectives import all_gather_single_autograd, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees every operator; no public one
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode, _is_compiling

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.tensor import DTensor, Placement

# The two forwards of selective activation checkpointing. Tested with 2.13. Public
# create_selective_checkpoint_contexts, which cannot be told to match saved operations only.
SaveMode = _CachingTorchDispatchMode
RecomputeMode = _CachedTorchDispatchMode

# Attention inside documents: needs the log-sum-exp, for a backward of its own. Tested with 2.13. No public one on CPU.
flash_attention_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# A copy in another type, as dispatch modes see it. Tested with 2.13. Public as Tensor.to.
to_copy = torch.ops.aten._to_copy.default

# Hooks of torch's elastic agent that a subclass overrides. Tested with 2.13. In torch's documentation of
# SimpleElasticAgent, where they are the way to extend it.
AGENT_HOOKS = (
    "_assign_worker_ranks",
    "_start_workers",
    "_monitor_workers",
    "_restart_workers",
    "_stop_workers",
    "_shutdown",
)


def foreach_copy_(to: list[Tensor], source: list[Tensor]) -> None:
    """Copy many tensors in few kernels. Tested with 2.13. No public one."""
    torch._foreach_copy_(to, source)


def foreach_norm(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """The 2-norm of each tensor, in fp32. Tested with 2.13. Public get_total_norm gives only one norm of all."""
    return torch._foreach_norm(tensors, dtype=torch.float32)


def foreach_mul_(tensors: list[Tensor], factor: Tensor) -> None:
    """Scale many tensors in few kernels. Tested with 2.13. No public one."""
    torch._foreach_mul_(tensors, factor)


def is_compiling(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether torch.compile is tracing a dispatched operation. Tested with 2.13. No public one."""
    compiling: bool = _is_compiling(op, args, kwargs)  # type: ignore[no-untyped-call]
    return compiling


def redirect_higher_order_ops(mode: type) -> None:
    """Let a subclass of SaveMode or RecomputeMode see higher-order operators, which know modes by their exact type.
    Tested with 2.13. No public one."""
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
    from torch._higher_order_ops.utils import redirect_to_mode
    from torch._higher_order_ops.wrap import inductor_compiled_code

    for operator in (inductor_compiled_code, triton_kernel_wrapper_mutation):
        redirect_to_mode(operator, mode)


def set_activation_memory_budget(budget: float) -> None:
    """The share of activations that torch.compile may keep for backward. Tested with 2.13. No public one."""
    import torch._functorch.config as compiler

    compiler.activation_memory_budget = budget


def enable_micro_pipeline_tp(group: dist.ProcessGroup) -> None:
    """Overlap of matrix products with the collectives of a group (async TP), in torch.compile. Tested with 2.13. No
    public one."""
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # Deprecated as not needed any more, but still needed by this pass (pytorch/pytorch#193027).
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)


def emulate_precision_casts() -> None:
    """Let compiled code round where eager code does, which rowwise float8 relies on (pytorch/pytorch#150859). Tested
    with 2.13. No public one."""
    import torch._inductor.config as inductor

    inductor.emulate_precision_casts = True


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Several dimensions of a mesh as one. Tested with 2.13. No public one."""
    return mesh._flatten(name)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Submeshes of one mesh as one mesh with the dimensions of all. Tested with 2.13. No public one."""
    return DeviceMesh._concatenate(meshes)


def all_gather_autograd(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather with a gradient. Tested with 2.13. Public torch.distributed.nn.functional, by other operations than
    the functional ones, which selective checkpointing and torch.compile know."""
    gathered: Tensor = all_gather_single_autograd(tensor, dim, group)
    return gathered


def all_to_all_autograd(
    tensor: Tensor, receive: list[int] | None, send: list[int] | None, group: dist.ProcessGroup
) -> Tensor:
    """All-to-all with a gradient; None splits evenly. Tested with 2.13. Public as all_gather_autograd is."""
    return all_to_all_single_autograd(tensor, receive, send, group)


def process_group_by_name(name: str) -> dist.ProcessGroup:
    """The group that operations name, which take no group itself. Tested with 2.13. No public one."""
    from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]

    group: dist.ProcessGroup = _resolve_process_group(GroupName(name))
    return group


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: tuple[Tensor, Tensor, int, int], *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp [H, tokens] of torch.nn.attention.varlen, whose public function has no backward pass for a
    part of the keys. Sequences: cu_q, cu_k, max_q, max_k. Tested with 2.13."""
    import torch.nn.attention.varlen  # defines the operation

    window = [-1, 0 if is_causal else -1]
    out, lse, _ = torch.ops.torch_attn._varlen_attn(
        q, k, v, *sequences, is_causal, None, window, q.shape[1] != k.shape[1]
    )
    return out, lse


def varlen_backward(
    tensors: Sequence[Tensor], lse: Tensor, sequences: tuple[Tensor, Tensor, int, int], *, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from grad, q, k, v and out. Tested with 2.13. Public as varlen_forward is."""
    import torch.nn.attention.varlen  # defines the operation

    unused = torch.zeros(2, dtype=torch.uint64, device=lse.device)  # random state of a dropout of 0
    window = [-1, 0 if is_causal else -1]
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn_backward(
        *tensors, lse, *sequences, is_causal, unused, None, window
    )
    return gradients


def local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and first index of this rank's shard, also if it is empty. Tested with 2.13. No public one."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def local_shape_and_offset_at(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and first index of the shard of the rank at a coordinate of a mesh. Tested with 2.13. No public one."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    return _compute_local_shape_and_global_offset(tuple(shape), tuple(mesh_shape), coordinate.__getitem__, placements)


def dtensor_like(tensor: DTensor, shard: Tensor) -> DTensor:
    """``shard`` as the local shard of a DTensor like ``tensor``, on any device. Tested with 2.13. Public from_local
    would move it to the device of the mesh."""
    from torch.distributed.tensor import DTensor

    inner = {"_local_tensor": shard, "device_mesh": tensor.device_mesh}
    spec = tensor.__tensor_flatten__()[1]  # type: ignore[no-untyped-call]
    wrapped: DTensor = DTensor.__tensor_unflatten__(  # type: ignore[no-untyped-call]
        inner, spec, tensor.size(), tensor.stride()
    )
    return wrapped


def silence_redistribute_warning() -> None:
    """Where FSDP and TP shard the same dimension, gathering a gradient takes two collectives, and torch warns of it.
    Tested with 2.13. The logger has no public name."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def fsdp_param_groups(module: Any) -> list[Any]:
    """FSDP2's groups of parameters that are gathered and reduced together, in module order. Tested with 2.13. No
    public one."""
    from torch.distributed.fsdp import FSDPModule

    # Modules that were sharded together have one state.
    states = dict.fromkeys(part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule))
    return [group for state in states for group in state._fsdp_param_groups]


def set_reduce_dtype(groups: list[Any], dtype: torch.dtype) -> None:
    """What groups of FSDP2 send when they next reduce gradients. To be called after a forward pass, the first of which
    sets it from the policy. Tested with 2.13. The public reduce_dtype of the policy is also what micro-batches are
    added up in."""
    for group in groups:
        group._reduce_dtype = dtype


def fsdp_wait_methods(module: nn.Module) -> list[tuple[Any, str]]:
    """The groups of FSDP2 and the methods in which their stream, or on a CPU the host, waits for collectives and copies
    into and out of their buffers. Tested with 2.13. No public one."""
    names = ("wait_for_unshard", "post_backward", "finalize_backward")
    return [(group, name) for group in fsdp_param_groups(module) for name in names]


def gathered_weights(module: nn.Module) -> list[Tensor]:
    """The buffers into which FSDP2 gathers the weights of a module; empty ones while they are freed. Tested with 2.13.
    No public one."""
    groups = fsdp_param_groups(module)
    return [buffer for group in groups for parameter in group.fsdp_params for buffer in parameter.all_gather_outputs]


def unsharded_numel(fsdp_param: Any) -> int:
    """Elements of a parameter of an FSDP2 group before sharding. Tested with 2.13. No public one."""
    numel: int = fsdp_param._orig_size.numel()
    return numel


def has_gradient(fsdp_param: Any) -> bool:
    """Whether a parameter of an FSDP2 group is trained. Tested with 2.13. No public one."""
    trained: bool = fsdp_param.sharded_param.requires_grad
    return trained


def stage_backward(stage_output: Any, output_grads: Any, input_values: Any) -> Any:
    """Backward of a pipeline stage. Tested with 2.13. Public PipelineStage runs it, with its own gradient sync."""
    from torch.distributed.pipelining._backward import stage_backward

    return stage_backward(stage_output, output_grads, input_values)


def stage_backward_input(
    stage_output: Any, output_grads: Any, input_values: Any, weights: Iterable[nn.Parameter]
) -> Any:
    """The half of a split backward that gives gradients of inputs. Tested with 2.13. Public as stage_backward is."""
    from torch.distributed.pipelining._backward import stage_backward_input

    return stage_backward_input(stage_output, output_grads, input_values, iter(weights))


def stage_backward_weight(weights: Iterable[nn.Parameter], param_groups: list[dict[str, Any]]) -> None:
    """The half that gives gradients of weights. Tested with 2.13. Public as stage_backward is."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(weights), param_groups)


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A process group that is not registered with torch.distributed. Tested with 2.13. Public
    torch.distributed.ProcessGroupGloo, which type checkers do not see."""
    return _ProcessGroupGloo(store, rank, size, timeout)


def receive_from_any(group: Any, tensor: Tensor, tag: int) -> int:
    """Receive from whichever rank of a ``gloo_group`` sends first, and return that rank. Tested with 2.13. No public
    one for such a group."""
    work = group.recv_anysource([tensor], tag)
    work.wait()
    return int(work._source_rank())


def default_store() -> Store:
    """The store through which the ranks of the default process group found each other. Tested with 2.13. No public
    one."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: Store = _get_default_store()
    return store


def nccl_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A group like :func:`gloo_group`, on GPUs. Its timeout has no public name. In builds with CUDA only."""
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)


def init_fake_process_group(rank: int, world_size: int) -> None:
    """Act as one rank of a process group whose collectives do nothing. Tested with 2.13. No public one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def fake_tensor_mode() -> Any:
    """A mode whose tensors have shape, type and device, and no memory.

    Tested with 2.13. Public on the meta device, on which FSDP does not run.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_tensor_type() -> type[Tensor]:
    """The tensors of that mode. Tested with 2.13. No public one."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def dump_flight_recorders() -> list[bytes]:
    """The collectives of this rank as JSON, of NCCL in builds with CUDA and of gloo, which other recorders
    keep. Tested with 2.13. No public one."""
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    dumps: list[bytes | str] = [_dump_fr_trace_json()]
    if dist.is_nccl_available():
        from torch._C._distributed_c10d import _dump_nccl_trace_json  # type: ignore[attr-defined]

        dumps.insert(0, _dump_nccl_trace_json())
    return [dump if isinstance(dump, bytes) else dump.encode() for dump in dumps]


def process_group_ranks() -> dict[str, list[int]]:
    """The ranks of every process group of this rank in the order of the group, by its name in the flight recorder; any
    thread may ask. Tested with 2.13. Public get_process_group_ranks, for a group that one has."""
    from torch.distributed.distributed_c10d import _world

    places = {name: _world.pg_group_ranks.get(group, {}) for group, name in list(_world.pg_names.items())}
    return {name: sorted(place_of, key=place_of.__getitem__) for name, place_of in places.items()}


def has_nccl_groups() -> bool:
    """Whether this rank is in process groups of NCCL; any thread may ask."""
    return dist.is_initialized() and dist.is_nccl_available() and "nccl" in dist.get_backend_config()


def abort_nccl_groups() -> None:
    """End all collectives of NCCL that this rank waits in, from any thread. The call needs a GPU and was not tested
    with one. No public one."""
    from torch.distributed.distributed_c10d import _abort_process_group

    _abort_process_group()


def record_cuda_memory(*, enabled: bool) -> None:
    """Record the history of CUDA's allocator, or stop. Tested with 2.13. No public one."""
    torch.cuda.memory._record_memory_history("all" if enabled else None)


def dump_cuda_memory(path: str) -> None:
    """Write that history, for https://pytorch.org/memory_viz. Tested with 2.13. No public one."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]


def worker_context(agent: LocalElasticAgent) -> SubprocessContext | None:
    """The processes of an agent's workers; None before their first start. Tested with 2.13. No public one."""
    context: SubprocessContext | None = agent._pcontext  # type: ignore[assignment]
    return context


def remaining_restarts(agent: LocalElasticAgent) -> int:
    """Tested with 2.13. No public one."""
    return agent._remaining_restarts


def forbid_restarts(agent: LocalElasticAgent) -> None:
    """The next failure of a worker ends the job. Tested with 2.13. No public one."""
    agent._remaining_restarts = 0


def storage_info(path: str, offset: int, length: int) -> Any:
    """Where DCP finds a tensor in its files. Tested with 2.13. No public one."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length)


def fsspec_filesystem() -> Any:
    """DCP's file system for object stores. Tested with 2.13. No public one."""
    from torch.distributed.checkpoint._fsspec_filesystem import FileSystem

    return FileSystem()
