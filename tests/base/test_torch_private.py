"""Private APIs of torch: all are in one module, and this torch still has them as they are used there."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero2all.base import torch_private
from zero2all.parallel.activation_checkpoint import SAVED_OPS

SOURCE = Path(torch_private.__file__).parents[1]
SIGNATURES: dict[str, list[str] | None] = {
    # The parameters that are passed; further ones need defaults. None: written in C++, and called by a test below.
    "torch._subclasses.fake_tensor.FakeTensor": None,
    "torch.ops.aten._to_copy": None,
    "torch._subclasses.fake_tensor.FakeTensorMode": ["allow_fallback_kernels", "allow_non_fake_inputs"],
    "torch.distributed.distributed_c10d._get_default_store": [],
    "torch._C._distributed_c10d.DebugLevel": None,
    "torch._C._distributed_c10d.FileStore": None,
    "torch._C._distributed_c10d.HashStore": None,
    "torch._C._distributed_c10d.PrefixStore": None,
    "torch._C._distributed_c10d.ProcessGroupGloo": None,
    "torch._C._distributed_c10d.ProcessGroupNCCL": None,
    "torch._C._distributed_c10d.Store": None,
    "torch._C._distributed_c10d.TCPStore": None,
    "torch._C._distributed_c10d._dump_fr_trace_json": None,
    "torch._C._distributed_c10d._dump_nccl_trace_json": None,
    "torch._C._distributed_c10d.set_debug_level": None,
    "torch.distributed.distributed_c10d._abort_process_group": [],
    "torch.distributed.distributed_c10d._resolve_process_group": None,
    "torch.distributed.distributed_c10d._world": None,
    "torch.nn.attention.varlen._varlen_attn": None,
    "torch.nn.attention.varlen._varlen_attn_backward": None,
    "torch._foreach_copy_": None,
    "torch._foreach_mul_": None,
    "torch._foreach_norm": None,
    "torch._functorch.config": None,
    "torch._higher_order_ops.triton_kernel_wrap.triton_kernel_wrapper_mutation": None,
    "torch._higher_order_ops.utils.redirect_to_mode": ["hop", "mode"],
    "torch._higher_order_ops.wrap.inductor_compiled_code": None,
    "torch._inductor.config": None,
    "torch.distributed._functional_collectives.all_gather_single_autograd": ["self", "gather_dim", "group"],
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group": ["group_name"],
    "torch.distributed._functional_collectives.all_to_all_single_autograd": [
        "self", "output_split_sizes", "input_split_sizes", "group",
    ],
    "torch.distributed.checkpoint._fsspec_filesystem.FileSystem": [],
    "torch.distributed.checkpoint.filesystem._StorageInfo": ["relative_path", "offset", "length"],
    "torch.distributed.device_mesh.DeviceMesh._concatenate": ["device_mesh_list"],
    "torch.distributed.device_mesh.DeviceMesh._flatten": ["self", "mesh_dim_name"],
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": ["self"],
    "torch.distributed.pipelining._backward.stage_backward": ["stage_output", "output_grads", "input_values"],
    "torch.distributed.pipelining._backward.stage_backward_input": [
        "stage_outputs_or_loss", "output_grads", "input_values", "weights",
    ],
    "torch.distributed.pipelining._backward.stage_backward_weight": ["weights", "param_groups"],
    "torch.distributed.tensor.DTensor.__tensor_flatten__": ["self"],
    "torch.distributed.tensor.DTensor.__tensor_unflatten__": [
        "inner_tensors", "flatten_spec", "outer_size", "outer_stride",
    ],
    "torch.distributed.tensor._redistribute": None,
    "torch.distributed.tensor._utils._compute_local_shape_and_global_offset": [
        "global_shape", "mesh_shape", "my_coordinate", "placements",
    ],
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": ["global_shape", "mesh", "placements"],
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": None,
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": None,
    "torch.testing._internal.distributed.fake_pg.FakeStore": None,
    "torch.cuda.memory._dump_snapshot": ["filename"],
    "torch.cuda.memory._record_memory_history": ["enabled"],
    "torch.utils._python_dispatch.TorchDispatchMode": [],
    "torch.utils.checkpoint._CachedTorchDispatchMode": ["policy_fn", "storage"],
    "torch.utils.checkpoint._CachingTorchDispatchMode": ["policy_fn", "storage"],
    "torch.utils.checkpoint._is_compiling": ["func", "args", "kwargs"],
}  # fmt: skip
ATTRIBUTES = {
    "_fsdp_param_groups",
    "_micro_pipeline_tp",
    "_orig_size",
    "_pcontext",
    "_reduce_dtype",
    "_remaining_restarts",
    "_source_rank",
    "_timeout",
}  # used below
OF_OTHER_LIBRARIES = {
    "os._exit", "atexit._run_exitfuncs", "pool._processes", "cast(Any, zipfile)._EndRecData", "entry._entry_p",
    "_http._GLOBAL_CLIENT_FACTORY",
}  # fmt: skip
NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}  # public in spite of the underscore


def is_private(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return name in ("__tensor_flatten__", "__tensor_unflatten__") or (name.startswith("_") and not dunder)


def private_torch_names(source: str) -> set[str]:
    """Private names of torch in a module: dotted ones, and attributes of objects whose module does not define them."""
    if "torch" not in source and "._" not in source and "__tensor_" not in source:
        return set()
    nodes = list(ast.walk(ast.parse(source)))
    paths = list(_torch_imports(nodes))
    imported, own = dict(paths), _own_names(nodes)
    found = {path for _, path in paths if any(map(is_private, path.split(".")))}
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root, *rest = ast.unparse(node).split(".")
            if root in imported and all(name.isidentifier() for name in rest):
                found.add(".".join([imported[root], *rest]))
            elif node.attr not in own | NAMED_TUPLE and ast.unparse(node) not in OF_OTHER_LIBRARIES:
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "torch" in node.value:
            found.update(re.findall(r"\btorch(?:\.\w+)*\._\w+", node.value))
        elif isinstance(node, ast.ClassDef):
            bases = [_resolve(imported[ast.unparse(base)]) for base in node.bases if ast.unparse(base) in imported]
            methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef) and is_private(part.name)}
            found.update(method for method in methods for base in bases if hasattr(base, method))
    return found


def _torch_imports(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """The local name and the full name of all that is imported from torch, also inside functions."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from ((name.asname or name.name, f"{node.module}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "torch":
                    yield (name.asname, name.name) if name.asname else ("torch", "torch")
                    yield "", name.name


def _own_names(nodes: list[ast.AST]) -> set[str]:
    """Methods, class attributes and what is assigned to self: the private names that are this module's own."""
    own = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            own.add(node.attr)
    return own


def _resolve(path: str) -> Any:
    module, names = path, list[str]()
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            names.insert(0, name)
    for name in names:
        found = getattr(found, name)
    return found


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    found = {path.relative_to(SOURCE): private_torch_names(path.read_text("utf-8")) for path in SOURCE.rglob("*.py")}
    used, checked = found.pop(Path("base/torch_private.py")), {*SIGNATURES, *ATTRIBUTES}
    assert {name.rpartition(".")[2] for name in used} == {name.rpartition(".")[2] for name in checked}
    found[Path("cluster/launch/agent.py")] -= {*torch_private.AGENT_HOOKS}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._foreach_norm([])",
        "import torch._dynamo",
        "import torch.distributed as dist\ndist._all_gather_base()",
        "def f():\n    from torch._inductor import config",
        "from torch.distributed.fsdp import FSDPModule\nfor part in parts:\n    part._get_fsdp_state()",
        "tensor.__tensor_flatten__()",
        "import sys\nsys.modules['torch._C']",
        "from torch import nn\nclass Part(nn.Module):\n    def f(self):\n        return self._modules",
        "from torch.nn import Module\nclass Part(Module):\n    def _call_impl(self): ...",
    ],
)
def test_private_names_are_found(source: str) -> None:
    assert private_torch_names(source)


def test_own_and_public_names_are_not_found() -> None:
    own = "import torch\nclass A:\n    def __init__(self):\n        self._x = torch.__version__\n    def f(self, b):\n"
    assert private_torch_names(own + "        return self._x, b._x, super().__init__(), torch.nn.functional\n") == set()


@pytest.mark.parametrize("name", SIGNATURES)
def test_private_api_is_there(name: str) -> None:
    if "nccl" in name.lower() and not dist.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    found, expected = _resolve(name), SIGNATURES[name]
    if expected is not None:
        parameters = list(inspect.signature(found).parameters.values())
        assert [parameter.name for parameter in parameters[: len(expected)]] == expected
        optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        more = [p.name for p in parameters[len(expected) :] if p.default is p.empty and p.kind not in optional]
        assert more == [], "parameters that are not passed"


def test_agent_hooks_have_the_signatures_of_torch() -> None:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    from zero2all.cluster.launch.agent import Agent

    methods = [name for name, value in vars(Agent).items() if inspect.isfunction(value) and is_private(name)]
    overridden = {name for name in methods if hasattr(LocalElasticAgent, name)}
    assert overridden == {*torch_private.AGENT_HOOKS}
    for name in overridden:
        ours, theirs = (inspect.signature(getattr(cls, name)).parameters for cls in (Agent, LocalElasticAgent))
        assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()], name


def test_agent_state() -> None:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    rendezvous: Any = SimpleNamespace(get_run_id=lambda: "run", get_backend=lambda: "none")
    spec = WorkerSpec(
        "default", 1, rendezvous, entrypoint=sys.executable, args=("-c", "pass"), max_restarts=3, monitor_interval=0.1
    )
    agent = LocalElasticAgent(spec, DefaultLogsSpecs())
    assert torch_private.worker_context(agent) is None
    assert torch_private.remaining_restarts(agent) == 3
    torch_private.forbid_restarts(agent)
    assert torch_private.remaining_restarts(agent) == 0
    assert "subprocess_handlers" in inspect.getsource(SubprocessContext)


def test_stores_and_groups(tmp_path: Path) -> None:
    store = torch_private.FileStore(str(tmp_path / "store"), 1)
    assert isinstance(store, torch_private.Store)
    prefixed = torch_private.PrefixStore("a", store)
    prefixed.set("key", "value")
    assert prefixed.get("key") == b"value"
    group = torch_private.gloo_group(prefixed, 0, 1, timedelta(seconds=10))
    mine, parts = torch.ones(2), [torch.zeros(2)]
    group.allgather([parts], [mine]).wait()
    assert torch.equal(parts[0], mine)
    torch_private.set_debug_level(torch_private.DebugLevel.OFF)
    tcp = torch_private.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=10))
    assert tcp.port > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_nccl_group(tmp_path: Path) -> None:
    store = torch_private.FileStore(str(tmp_path / "store"), 1)
    torch_private.nccl_group(store, 0, 1, timedelta(seconds=10))


def test_flight_recorders_are_json() -> None:
    dumps = torch_private.dump_flight_recorders()
    assert dumps
    assert all(isinstance(json.loads(dump), dict) for dump in dumps)
    assert len(dumps) == 1 + torch.distributed.is_nccl_available()


def test_foreach() -> None:
    ones, twos = [torch.ones(2), torch.ones(3, 2)], [torch.full((2,), 2.0), torch.full((3, 2), 2.0)]
    assert torch.equal(torch.stack(torch_private.foreach_norm(ones)), torch.tensor([2.0, 6.0]).sqrt())
    torch_private.foreach_mul_(ones, torch.tensor(2.0))
    assert all(map(torch.equal, ones, twos))
    torch_private.foreach_mul_(ones, torch.tensor(0.0))
    torch_private.foreach_copy_(ones, twos)
    assert all(map(torch.equal, ones, twos))


def test_flash_attention_with_its_backward() -> None:
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected.sum().backward()
    out, sums = torch_private.flash_attention_cpu(q.detach(), k.detach(), v.detach(), 0.0, True, attn_mask=None)
    torch.testing.assert_close(out, expected.detach())
    grads = torch_private.flash_attention_cpu_backward(
        torch.ones_like(out), q.detach(), k.detach(), v.detach(), out, sums, 0.0, True, attn_mask=None
    )
    for x, grad in zip((q, k, v), grads, strict=True):
        torch.testing.assert_close(x.grad, grad)


def test_compiler_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._functorch.config as compiler

    before = compiler.activation_memory_budget
    try:
        torch_private.set_activation_memory_budget(0.25)
        assert compiler.activation_memory_budget == 0.25
    finally:
        compiler.activation_memory_budget = before
    assert not torch_private.is_compiling(None, (), {})
    assert _resolve("torch._inductor.config")._micro_pipeline_tp is False  # set only on a GPU


def test_operations_saved_by_name_are_operations_of_this_torch() -> None:
    _resolve("torch.distributed._functional_collectives")
    names = [name.split("::") for name in SAVED_OPS if name.startswith(("aten::", "_c10d_functional::"))]
    assert len(names) > 10
    assert [name for space, name in names if not hasattr(getattr(torch.ops, space), name)] == []


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    torch_private.init_fake_process_group(0, count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_meshes_and_shards() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with fake_ranks(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        flat = torch_private.flatten_mesh(mesh["b", "c"], "bc")
        assert flat.shape == (4,)
        assert torch_private.concatenate_meshes([mesh["a"], flat]).shape == (2, 4)
        tensor = distribute_tensor(torch.zeros(5, 3), flat, [Shard(0)])
        assert torch_private.local_shape_and_offset(tensor) == ((2, 3), (0, 0))
        shards = [
            torch_private.local_shape_and_offset_at(tensor.shape, flat.shape, (rank,), tensor.placements)
            for rank in range(4)
        ]
        assert shards == [((2, 3), (0, 0)), ((2, 3), (2, 0)), ((1, 3), (4, 0)), ((0, 3), (5, 0))]
        wrapped = torch_private.dtensor_like(tensor, torch.ones(2, 3, device="meta"))
        assert (wrapped.shape, wrapped.placements) == (tensor.shape, tensor.placements)
        assert wrapped.to_local().device.type == "meta"


def test_logger_of_redistribute() -> None:
    logger = _resolve("torch.distributed.tensor._redistribute").logger
    before = logger.level
    try:
        torch_private.silence_redistribute_warning()
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)


def test_fsdp_param_groups() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with fake_ranks(2):
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        mesh = init_device_mesh("cpu", (2,))
        model[1].bias.requires_grad_(False)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        groups = torch_private.fsdp_param_groups(model)
        sizes = [[torch_private.unsharded_numel(parameter) for parameter in group.fsdp_params] for group in groups]
        assert sizes == [[10, 2], [15, 5]]
        trained = [[torch_private.has_gradient(parameter) for parameter in group.fsdp_params] for group in groups]
        assert sorted(map(sum, trained)) == [1, 2]
        assert all(callable(group.post_backward) for group in groups)
        assert isinstance(inspect.getattr_static(groups[0].fsdp_params[0], "unsharded_param"), property)


def test_split_backward_of_a_stage() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    torch_private.stage_backward(layer(x).sum(), None, [x])
    whole = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    x.grad = None
    inputs, families = torch_private.stage_backward_input([layer(x).sum()], None, [x], layer.parameters())
    assert len(inputs) == 1
    assert layer.weight.grad is None
    torch_private.stage_backward_weight(layer.parameters(), families)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(layer.parameters(), whole, strict=True))


def test_storage_of_checkpoints() -> None:
    info = torch_private.storage_info("file", 3, 5)
    assert (info.relative_path, info.offset, info.length) == ("file", 3, 5)
    assert callable(torch_private.fsspec_filesystem().init_path)
