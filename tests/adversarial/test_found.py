"""Inputs that fuzzing once found, smallest first: each is refused in one line, or costs only itself."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.adversarial.bounds import measure, survives
from tests.adversarial.fuzz_targets import CONFIG, FORMATS, STORE, load_weights, safetensors
from zero2all.base.errors import Z2aError
from zero2all.base.io import read_json
from zero2all.checkpoint.dcp_reader import read_metadata
from zero2all.checkpoint.pickle_scan import check_numbers
from zero2all.checkpoint.staged_slot import find_staged_slots
from zero2all.corpus.readers import RawFile, UnreadableFileError, read_records
from zero2all.corpus.readers.parquet_footer import read_row_groups
from zero2all.model import HFWeights
from zero2all.tokens import TokenStore

DEEP = b"[" * 100_000


def test_deep_nesting_in_any_json_file_is_damage_of_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(DEEP)
    with pytest.raises(Z2aError, match=r"a\.json is damaged \(nested too deeply"):
        read_json(tmp_path / "a.json")


def test_deep_nesting_in_the_manifest_of_a_token_store(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(STORE.encode().replace(b"2", DEEP))
    with pytest.raises(Z2aError, match="nested too deeply"):
        TokenStore(tmp_path, "train")


def test_a_staged_slot_with_a_damaged_header_is_none_and_the_others_are_found(tmp_path: Path) -> None:
    good = b'{"step": 1, "lineage": [["a1", 0]], "hash": null, "state": null}'
    for rank, header in enumerate((DEEP, good, b'{"step": ' + DEEP, b'{"step": "x"}')):
        (tmp_path / f"rank-{rank}-of-4").mkdir()
        (tmp_path / f"rank-{rank}-of-4" / "slot-0.json").write_bytes(header)
    assert [slot.rank for slot in find_staged_slots(tmp_path)] == [1]


@pytest.mark.parametrize(
    "changed",
    [
        {"vocab_size": -1}, {"hidden_size": 0}, {"num_hidden_layers": 0}, {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 9999}, {"num_attention_heads": 0}, {"head_dim": -2}, {"max_position_embeddings": 10**30},
        {"rms_norm_eps": float("nan")}, {"rope_theta": -1.0}, {"attention_dropout": 2.0},
        {"hidden_size": 1 << 20, "num_attention_heads": 1 << 20, "head_dim": 1 << 20},
        {"rope_scaling": {"rope_type": "dynamic", "factor": float("inf")}},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 10**10},
        {"model_type": "qwen3_moe", "num_experts": 60_000, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
    ],
)  # fmt: skip
def test_a_config_of_no_model_is_refused_in_one_line(changed: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads(CONFIG) | changed))
    (tmp_path / "model.safetensors").write_bytes(safetensors())
    with pytest.raises(Z2aError) as caught:
        survives(lambda: HFWeights(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_config_that_is_nested_deeply_is_refused() -> None:
    load_weights(DEEP, safetensors())


def _parquet(**options: object) -> bytes:
    words = [f"word {number % 7}" for number in range(500)]
    sink = io.BytesIO()
    columns = {"text": words, "tags": [[word, None] for word in words], "number": range(500), "other": words}
    pq.write_table(pa.table(columns), sink, row_group_size=100, compression="none", **options)
    return sink.getvalue()


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False, "column_encoding": {"other": "DELTA_BYTE_ARRAY"}}])
def test_the_footer_of_a_parquet_file_is_read_as_arrow_reads_it(options: dict[str, object]) -> None:
    file = io.BytesIO(_parquet(**options))
    metadata = pq.read_metadata(file)
    for number, group in enumerate(read_row_groups(file, metadata.num_columns)):
        theirs = metadata.row_group(number)
        assert (group.num_rows, group.total_byte_size) == (theirs.num_rows, theirs.total_byte_size)
        columns = [theirs.column(column) for column in range(theirs.num_columns)]
        assert [(one.num_values, one.total_uncompressed_size, one.total_compressed_size) for one in group.columns] == [
            (one.num_values, one.total_uncompressed_size, one.total_compressed_size) for one in columns
        ]
        assert [one.is_delta for one in group.columns] == [
            any(encoding.startswith("DELTA") for encoding in one.encodings) for one in columns
        ]


def test_a_damaged_parquet_file_ends_no_process(tmp_path: Path) -> None:
    """Every byte of a small one: accessors of the footer abort, and places in dictionaries are not checked."""
    good = FORMATS["a.parquet"]
    for place in range(len(good)):
        data = bytearray(good)
        data[place] ^= 1 << place % 8 | 2
        (tmp_path / "a.parquet").write_bytes(data)
        with suppress(UnreadableFileError):
            assert len(list(read_records(RawFile.from_path(tmp_path / "a.parquet")))) <= 1


def test_an_index_that_is_not_in_its_dictionary_is_a_broken_file() -> None:
    from zero2all.corpus.readers.parquet import row_sizes

    for place in (2, 116, -1):
        indices = pa.array([0, 1, None, place], pa.int32())
        column = pa.DictionaryArray.from_arrays(indices, pa.array(["a", "bb"]), safe=False)
        with pytest.raises(pa.ArrowInvalid, match="not in its dictionary"):
            row_sizes(column)


def _numbered(number: int) -> bytes:
    return b"\x80\x04]" + b"r" + number.to_bytes(4, "little") + b"."


METADATA = {
    "a number that would take 64 GiB": _numbered(2**32 - 1),
    "a number that would take 1.6 GiB": _numbered(10**8),
    "the same as text": b"]p100000000\n.",
    "behind text that looks like the end": b"\x8c\x03..." + _numbered(10**8),
    "behind a name": b"ctorch\nSize\n" + _numbered(10**8),
    "in a damaged one": _numbered(10**8)[:-1] + b"\xff",
    "a key that overflows the stack": b"\x80\x04})" + b"\x85" * 200_000 + b"Ns.",
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_of_a_checkpoint_take_memory_in_proportion_to_their_size(name: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(METADATA[name])

    def refused() -> None:
        with pytest.raises(Z2aError, match=r"\.metadata is damaged"):
            read_metadata(tmp_path / ".metadata")

    assert measure(refused)[1].memory < 200 << 20


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_was_pickled_passes_the_check(protocol: int) -> None:
    shared = [("a\nname", 1.5, b"bytes\n", 2**70, None, True, number, -number) for number in range(300)]
    value = {"a": shared, "b": [*shared, frozenset({1, 2}), {"x": ()}, Path("a")], "c": "r" * 70_000}
    data = pickle.dumps(value, protocol)
    check_numbers(data)
    numbered = {str(index) for opcode, index, _ in pickletools.genops(data) if "PUT" in opcode.name}
    assert len(numbered) > 300 or protocol >= 4, "else the check was not asked anything"
