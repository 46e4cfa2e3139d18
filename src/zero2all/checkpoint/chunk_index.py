"""An index of a checkpoint's chunks in columns, beside DCP's ``.metadata``.

``.metadata`` is one pickle of several Python objects for each chunk. A thousand ranks with two thousand tensors each
make two million chunks, and every rank would unpickle all of them to find its own two thousand. Here chunks are rows of
a Parquet file of integers, sorted by tensor: a rank selects the rows it needs with numpy, and plans its reads alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from zero2all.base.errors import Z2aError
from zero2all.base.records import decode_json, parse_record
from zero2all.base.torch_private import storage_info
from zero2all.checkpoint.integrity import DamagedError

INDEX_FILE: Final = "chunks.parquet"
DTYPES: Final = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
HEADER_KEY: Final = b"zero2all"
Columns = NDArray[np.int64]
Region = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a part of a tensor."""


@dataclass(frozen=True)
class IndexedTensor:
    name: str
    dtype: str
    size: list[int]

    @property
    def entry(self) -> TensorStorageMetadata:
        """The description that DCP uses, without chunks."""
        return TensorStorageMetadata(TensorProperties(dtype=DTYPES[self.dtype]), torch.Size(self.size), [])


@dataclass(frozen=True)
class IndexHeader:
    tensors: list[IndexedTensor]
    """Sorted by name."""
    files: list[str]
    metadata_sha256: str = ""
    """Checksum of the ``.metadata`` with the same content. Empty in the index of one rank."""


@dataclass(frozen=True)
class ChunkIndex:
    """Row i of each column describes a chunk; rows are sorted by tensor and place."""

    header: IndexHeader
    tensor: Columns
    """Number of the tensor in the header."""
    file: Columns
    at: Columns
    length: Columns
    begin: Columns
    """[rows, dimensions], padded with 0 for tensors of fewer dimensions."""
    extent: Columns
    """The same, padded with 1."""

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def from_results(cls, items: Sequence[WriteItem], results: Sequence[WriteResult]) -> ChunkIndex:
        """The index of what one rank wrote."""
        written = {result.index: result.storage_data for result in results}
        tensors: dict[str, IndexedTensor] = {}
        files: dict[str, int] = {}
        rows = []
        for item in items:
            assert item.tensor_data is not None  # entries that are not tensors are not saved
            name, data, place = item.index.fqn, item.tensor_data, written[item.index]
            dtype = str(data.properties.dtype).removeprefix("torch.")
            tensors[name] = IndexedTensor(name, dtype, list(data.size))
            file = files.setdefault(place.relative_path, len(files))
            rows.append((name, file, place.offset, place.length, data.chunk.offsets, data.chunk.sizes))
        names = sorted(tensors)
        numbers = {name: number for number, name in enumerate(names)}
        dimensions = max((len(tensors[name].size) for name in names), default=0)
        begin, extent = np.zeros((len(rows), dimensions), np.int64), np.ones((len(rows), dimensions), np.int64)
        for row, (*_, offsets, sizes) in enumerate(rows):
            begin[row, : len(offsets)], extent[row, : len(sizes)] = offsets, sizes
        plain = np.array([(numbers[row[0]], *row[1:4]) for row in rows], np.int64).reshape(-1, 4)
        header = IndexHeader([tensors[name] for name in names], list(files))
        return cls(header, plain[:, 0], plain[:, 1], plain[:, 2], plain[:, 3], begin, extent)._sorted()

    @classmethod
    def merge(cls, parts: Sequence[ChunkIndex]) -> ChunkIndex:
        """One index of what all ranks wrote. Raises if the chunks of a tensor do not make up all of it."""
        tensors = {tensor.name: tensor for part in parts for tensor in part.header.tensors}
        names = sorted(tensors)
        numbers = {name: number for number, name in enumerate(names)}
        files = list(dict.fromkeys(file for part in parts for file in part.header.files))
        file_numbers = {file: number for number, file in enumerate(files)}
        dimensions = max((part.begin.shape[1] for part in parts), default=0)
        columns: list[tuple[Columns, ...]] = []
        for part in parts:
            renumbered = np.array([numbers[tensor.name] for tensor in part.header.tensors], np.int64)
            new_files = np.array([file_numbers[file] for file in part.header.files], np.int64)
            padding = ((0, 0), (0, dimensions - part.begin.shape[1]))
            begin, extent = np.pad(part.begin, padding), np.pad(part.extent, padding, constant_values=1)
            columns.append((renumbered[part.tensor], new_files[part.file], part.at, part.length, begin, extent))
        header = IndexHeader([tensors[name] for name in names], files)
        merged = cls(header, *(np.concatenate(column) for column in zip(*columns, strict=True)))._sorted()
        merged._check_coverage()
        return merged

    def _sorted(self) -> ChunkIndex:
        order = np.lexsort((*self.begin.T[::-1], self.tensor))
        return ChunkIndex(self.header, *(column[order] for column in self._columns()))

    def _columns(self) -> tuple[Columns, ...]:
        return self.tensor, self.file, self.at, self.length, self.begin, self.extent

    def _check_coverage(self) -> None:
        sizes = self._padded_sizes()
        saved = np.zeros(len(sizes), np.int64)
        np.add.at(saved, self.tensor, self.extent.prod(axis=1))
        is_wrong = saved != sizes.prod(axis=1)
        is_wrong[self.tensor[((self.begin + self.extent) > sizes[self.tensor]).any(axis=1)]] = True
        if is_wrong.any():
            name = self.header.tensors[int(np.flatnonzero(is_wrong)[0])].name
            raise Z2aError(f"the chunks of {name} on all ranks do not make up the tensor: nothing is published")

    def _padded_sizes(self) -> Columns:
        sizes = np.ones((len(self.header.tensors), self.begin.shape[1]), np.int64)
        for number, tensor in enumerate(self.header.tensors):
            sizes[number, : len(tensor.size)] = tensor.size
        return sizes

    def to_bytes(self, metadata_sha256: str = "") -> bytes:
        tensors = [[tensor.name, tensor.dtype, tensor.size] for tensor in self.header.tensors]
        header = {"tensors": tensors, "files": self.header.files, "metadata_sha256": metadata_sha256}
        columns = {"tensor": self.tensor, "file": self.file, "at": self.at, "length": self.length}
        for dimension in range(self.begin.shape[1]):
            columns[f"begin_{dimension}"] = self.begin[:, dimension]
            columns[f"extent_{dimension}"] = self.extent[:, dimension]
        table = pa.table(columns).replace_schema_metadata({HEADER_KEY: json.dumps(header)})
        stream = BytesIO()
        pq.write_table(table, stream, compression="zstd")
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> ChunkIndex:
        """Untrusted data: whatever is not an index raises ``DamagedError``."""
        try:
            table = pq.read_table(BytesIO(data))
            raw = decode_json(table.schema.metadata[HEADER_KEY])
            raw["tensors"] = [{"name": name, "dtype": kind, "size": size} for name, kind, size in raw["tensors"]]
            header = parse_record(IndexHeader, raw, INDEX_FILE)
            columns = {name: np.asarray(table[name]).astype(np.int64, copy=False) for name in table.column_names}
            dimensions = (len(columns) - 4) // 2
            begin, extent = (
                np.stack([columns[f"{kind}_{number}"] for number in range(dimensions)], axis=1)
                if dimensions
                else np.zeros((table.num_rows, 0), np.int64)
                for kind in ("begin", "extent")
            )
            index = cls(header, columns["tensor"], columns["file"], columns["at"], columns["length"], begin, extent)
            index._check_values()
        except (pa.ArrowException, Z2aError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise DamagedError(f"{INDEX_FILE} is damaged ({type(error).__name__})") from error
        return index

    def _check_values(self) -> None:
        names = [tensor.name for tensor in self.header.tensors]
        limits = ((self.tensor, len(names)), (self.file, len(self.header.files)))
        is_valid = (
            names == sorted(set(names))
            and all(tensor.dtype in DTYPES and min(tensor.size, default=0) >= 0 for tensor in self.header.tensors)
            and all(len(tensor.size) <= self.begin.shape[1] for tensor in self.header.tensors)
            # A name such as ../other would point outside the checkpoint.
            and not any("/" in name or "\\" in name or name in ("", ".", "..") for name in self.header.files)
            and all(((column >= 0) & (column < limit)).all() for column, limit in limits)
            and all((column >= 0).all() for column in self._columns())
            and bool((np.diff(self.tensor) >= 0).all())
        )
        if not is_valid:
            raise ValueError("values out of range")

    def entries(self) -> dict[str, TensorStorageMetadata]:
        """The tensors by name, as DCP describes them, without their chunks."""
        return {tensor.name: tensor.entry for tensor in self.header.tensors}

    def metadata(self, wanted: Mapping[str, Region | None] | None = None) -> Metadata:
        """DCP's metadata: all of it, or only the chunks that overlap the wanted region of each wanted tensor.

        None as a region wants a tensor's description only. Tensors that the checkpoint does not have are left out.
        """
        starts = np.searchsorted(self.tensor, np.arange(len(self.header.tensors) + 1))
        entries: dict[str, Any] = {}
        storage: dict[MetadataIndex, Any] = {}
        for number, tensor in enumerate(self.header.tensors):
            if wanted is not None and tensor.name not in wanted:
                continue
            rows = np.arange(starts[number], starts[number + 1])
            if wanted is not None:
                rows = self._overlapping(rows, wanted[tensor.name])
            entries[tensor.name] = self._add_chunks(tensor, rows, storage)
        return Metadata(
            state_dict_metadata=entries,
            planner_data={name: (name,) for name in entries},  # how torch's converters nest the state
            storage_data=storage,
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )

    def _overlapping(self, rows: NDArray[np.intp], region: Region | None) -> NDArray[np.intp]:
        if region is None:
            return rows[:0]
        offsets, sizes = (np.array(part, np.int64) for part in region)
        begin, extent = self.begin[rows, : len(offsets)], self.extent[rows, : len(offsets)]
        overlaps = (begin < offsets + sizes) & (offsets < begin + extent)
        return rows[overlaps.all(axis=1)]

    def _add_chunks(
        self, tensor: IndexedTensor, rows: NDArray[np.intp], storage: dict[MetadataIndex, Any]
    ) -> TensorStorageMetadata:
        entry, dimensions = tensor.entry, len(tensor.size)
        begins, extents = self.begin[rows, :dimensions].tolist(), self.extent[rows, :dimensions].tolist()
        places = zip(self.file[rows].tolist(), self.at[rows].tolist(), self.length[rows].tolist(), strict=True)
        for number, (begin, extent, (file, at, length)) in enumerate(zip(begins, extents, places, strict=True)):
            chunk = ChunkStorageMetadata(torch.Size(begin), torch.Size(extent))
            entry.chunks.append(chunk)
            index = MetadataIndex(tensor.name, chunk.offsets, number)
            storage[index] = storage_info(self.header.files[file], at, length)
        return entry
