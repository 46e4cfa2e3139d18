"""Reads a DCP checkpoint from an untrusted source without executing anything in it.

DCP keeps its table of contents in ``.metadata``, a pickle, and pickles entries that are not tensors. Here the few
classes that DCP writes become inert objects, which are checked and then copied into DCP's own types; any other name is
refused. Entries that are not tensors are never read. Tensors are read by torch with ``weights_only=True``.

Our own checkpoints also have an index of columns (``chunk_index.py``), from which each rank plans its reads alone.
States in memory are read by ``SlotReader``.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.futures import Future as TorchFuture

from zero2all.base.errors import Z2aError
from zero2all.base.paths import RemotePath, open_bytes
from zero2all.base.torch_private import fsspec_filesystem, local_shape_and_offset, storage_info
from zero2all.checkpoint.chunk_index import DTYPES, INDEX_FILE, ChunkIndex, Region
from zero2all.checkpoint.integrity import DamagedError, read_manifest_of_checkpoint
from zero2all.checkpoint.pickle_scan import call_with_stack_for, check_numbers
from zero2all.checkpoint.slot_format import ShardSpec
from zero2all.checkpoint.staged_slot import StagedSlot, map_slot

T = TypeVar("T")
ALLOWED_CLASSES: Final = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    )
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}


class _RefusedError(Exception):
    """A name that no checkpoint of DCP contains."""


class _InertObject:
    """Stands for an object in the pickle: it keeps its attributes and does nothing."""

    attributes: Any = None

    def __setstate__(self, state: Any) -> None:
        self.attributes = state

    def field(self, name: str, kind: type[T]) -> T:
        value = self.attributes[name]
        if not isinstance(value, kind):
            raise ValueError(f"{name} is of type {type(value).__name__}")
        return value


class _Ignored:
    """Stands for a value that nobody needs."""

    def __init__(self, *args: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: BytesIO) -> None:
        super().__init__(stream)
        # Classes of this one file: a pickle may set attributes of whatever it can name.
        self._known: dict[tuple[str, str], Any] = {key: type(key[1], (_InertObject,), {}) for key in ALLOWED_CLASSES}
        ignored = type("Ignored", (_Ignored,), {})
        self._known |= {
            ("torch", "Size"): tuple,
            # Never str or int: to print a nested tuple takes twice as long per level.
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): ignored,
            ("torch.serialization", "_get_layout"): ignored,
            ("pathlib", "PosixPath"): ignored,
            ("pathlib._local", "PosixPath"): ignored,
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise _RefusedError(f"{module}.{name}")


def read_metadata(path: Path) -> Metadata:
    """The tensors of a checkpoint and where they are stored; entries that are not tensors are skipped."""
    try:
        with open_bytes(path) as stream:
            data = stream.read()
        check_numbers(data)
        root = call_with_stack_for(data, lambda: _Unpickler(BytesIO(data)).load())
    except _RefusedError as refused:
        raise Z2aError(
            f"{path} contains {refused}, which no checkpoint needs and which could run code: nothing of it was loaded; "
            "get the checkpoint from its author again, or have the weights sent as safetensors ('z2a export')"
        ) from None
    except (OSError, Z2aError):
        raise
    except Exception as error:  # pickle raises whatever the bytes lead it to
        raise _damaged(path, error) from error
    try:
        return _metadata(root)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> Z2aError:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return Z2aError(f"{path} is damaged ({reason}): use another checkpoint ('z2a ckpt ls' lists them)")


def _metadata(root: Any) -> Metadata:
    if type(root).__name__ != "Metadata" or not isinstance(root, _InertObject):
        raise ValueError(f"it holds a {type(root).__name__}")
    tensors = {
        _name(name): _tensor(entry)
        for name, entry in root.field("state_dict_metadata", dict).items()
        if type(entry).__name__ != "BytesStorageMetadata"
    }
    storage_data = {_index(index): _storage_info(info) for index, info in root.field("storage_data", dict).items()}
    version = root.attributes.get("version")
    return Metadata(
        state_dict_metadata=dict(tensors),
        storage_data=storage_data,
        storage_meta=StorageMeta(),
        version=version if isinstance(version, str) else None,
    )


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"a {type(name).__name__} is no name")
    return name


def _tensor(entry: _InertObject) -> TensorStorageMetadata:
    dtype = entry.field("properties", _InertObject).attributes[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a {type(dtype).__name__} is no dtype")
    chunks = [
        ChunkStorageMetadata(_size(chunk, "offsets"), _size(chunk, "sizes")) for chunk in entry.attributes["chunks"]
    ]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), _size(entry, "size"), chunks)


def _index(index: _InertObject) -> MetadataIndex:
    offset = None if index.attributes.get("offset") is None else _size(index, "offset")
    position = index.attributes.get("index")
    if position is not None and type(position) is not int:
        raise ValueError(f"index is of type {type(position).__name__}")
    return MetadataIndex(index.field("fqn", str), offset, position)


def _storage_info(info: _InertObject) -> Any:
    file = info.field("relative_path", str)
    if Path(file).name != file:
        raise ValueError(f"it points outside the checkpoint: {file!r}")
    if info.attributes.get("transform_descriptors"):
        raise ValueError("it asks for a transformation of the data")
    return storage_info(file, info.field("offset", int), info.field("length", int))


def _size(entry: _InertObject, name: str) -> torch.Size:
    size = entry.field(name, tuple)
    if not all(type(length) is int and length >= 0 for length in size):
        raise ValueError(f"{name} is not made of lengths")
    return torch.Size(size)


def read_index(directory: Path) -> ChunkIndex | None:
    """The index of a checkpoint. None without one, or if ``.metadata`` is another than the index was written with."""
    try:
        manifest = read_manifest_of_checkpoint(directory)
        path = directory / ".metadata"
        size = path.size() if isinstance(path, RemotePath) else path.stat().st_size
    except (FileNotFoundError, NotADirectoryError, DamagedError):
        return None  # of another program, or of somebody who reads it in spite of its damage
    if INDEX_FILE not in manifest.files or manifest.sizes.get(".metadata") != size:
        return None
    try:
        index = ChunkIndex.from_bytes((directory / INDEX_FILE).read_bytes())
    except FileNotFoundError:
        return None
    except DamagedError as error:
        raise Z2aError(f"{directory}: {error}; use another checkpoint ('z2a ckpt ls' lists them)") from error
    return index if index.header.metadata_sha256 == manifest.files.get(".metadata") else None


def _local_region(tensor: Tensor) -> Region | None:
    """The part of a tensor that this rank holds; None if it holds none."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    if tensor.device_mesh.get_coordinate() is None:
        return None
    sizes, offsets = local_shape_and_offset(tensor)
    return offsets, sizes


class CheckpointReader(FileSystemReader):
    """DCP's reader for a directory on disk or in an object store, with metadata as above, read once."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._metadata_file = path / ".metadata"
        self._metadata: Metadata | None = None
        self._selected: Metadata | None = None  # what this rank reads, while it does
        self._index: ChunkIndex | None = None
        self._has_looked_for_index = False
        if isinstance(path, RemotePath):
            self.fs = fsspec_filesystem()
            self.path = self.fs.init_path(str(path))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._selected is not None:
            return self._selected
        if self._metadata is None:
            self._metadata = read_metadata(self._metadata_file)
        return self._metadata

    def entries(self) -> Mapping[str, TensorStorageMetadata]:
        """Type and size of every tensor by name; their chunks may be left out."""
        if (index := self._read_index()) is not None:
            return index.entries()
        entries = self.read_metadata().state_dict_metadata
        return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def _read_index(self) -> ChunkIndex | None:
        """The index of our own checkpoints, unless ``.metadata`` is no longer the one that it was written with."""
        if not self._has_looked_for_index:
            self._index = read_index(self._metadata_file.parent)
            self._has_looked_for_index = True
        return self._index

    def _select(self, wanted: dict[str, Region | None]) -> Metadata:
        """The metadata of the wanted tensors; without an index, the metadata of all tensors."""
        index = self._read_index()
        return self.read_metadata() if index is None else index.metadata(wanted)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:  # the planner would unpickle it
                raise Z2aError(f"{item.storage_index.fqn} is not stored as a tensor")
        return super().read_data(plan, planner)

    def load(self, tensors: dict[str, Any]) -> None:
        """Fill tensors in place. No collective: each rank plans and reads what it needs."""
        # Before DCP does, which would log a traceback of what is wrong with it.
        self._selected = self._select({name: _local_region(tensor) for name, tensor in tensors.items()})
        try:
            state_dict_loader.load(tensors, storage_reader=self, no_dist=True)
        except CheckpointException as error:
            raise Z2aError(
                f"{self._metadata_file.parent} cannot be loaded: {failure_reasons(error)} "
                "(choose another step: 'z2a ckpt ls' lists them)"
            ) from error
        finally:
            self._selected = None

    def read_part(self, name: str, begin: Sequence[int], size: Sequence[int]) -> Tensor:
        """The part of a tensor that begins at the index ``begin``. No collective: each rank reads what it needs."""
        metadata, directory = self._select({name: (begin, size)}), self._metadata_file.parent
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        part = torch.zeros(tuple(size), dtype=entry.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(begin), torch.Size(size))
        items = create_read_items_for_chunk_list(name, entry, [wanted])
        if sum(math.prod(item.lengths) for item in items) != part.numel():
            raise Z2aError(f"{directory} has only a part of {name}: use another checkpoint ('z2a ckpt ls' lists them)")
        self.set_up_storage_reader(metadata, is_coordinator=True)
        try:
            self.read_data(LoadPlan(items), _PartPlanner(part)).wait()
        except (OSError, Z2aError):
            raise
        except Exception as error:  # torch raises whatever the bytes lead it to
            raise _damaged(directory, error) from error
        return part


class _PartPlanner(DefaultLoadPlanner):
    """Reads into one tensor, which is a part of a stored one."""

    def __init__(self, part: Tensor) -> None:
        super().__init__()
        self._part = part

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._part


def failure_reasons(error: CheckpointException) -> str:
    """The distinct reasons of all ranks, in one line."""
    reasons = {str(reason).splitlines()[0] for reason, _ in error.failures.values() if str(reason)}
    return "; ".join(sorted(reasons)) or "no reason was given"


class SlotReader(StorageReader):
    """Reads the slots of one state, so that it can be resharded to another parallel layout."""

    def __init__(self, slots: list[StagedSlot]) -> None:
        self._slots = slots
        self._shard_locations: dict[MetadataIndex, tuple[Path, ShardSpec]] = {}
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: Any = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def load(self, tensors: dict[str, Any]) -> None:
        """Fill tensors in place. No collective: each rank plans its reads from the slots it was given."""
        state_dict_loader.load(tensors, storage_reader=self, no_dist=True)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = self._collect_metadata()
        return self._metadata

    def _collect_metadata(self) -> Metadata:
        known: dict[str, TensorStorageMetadata] = {}
        for slot in self._slots:
            for spec in slot.shard_specs():
                if spec.bytes == 0 and 0 not in spec.size:
                    continue  # an empty shard may have the offsets of another
                properties = TensorProperties(dtype=getattr(torch, spec.dtype))
                entry = known.setdefault(spec.name, TensorStorageMetadata(properties, torch.Size(spec.size), []))
                chunk = ChunkStorageMetadata(torch.Size(spec.offsets), torch.Size(spec.sizes))
                index = MetadataIndex(spec.name, chunk.offsets)
                if index not in self._shard_locations:  # replicas on several ranks
                    entry.chunks.append(chunk)
                    self._shard_locations[index] = (slot.data, spec)
        return Metadata(state_dict_metadata=dict(known))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        opened: dict[Path, Tensor] = {}
        for item in plan.items:
            path, spec = self._shard_locations[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
            if path not in opened:
                opened[path] = map_slot(path)
            source = spec.view(opened[path])
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done
