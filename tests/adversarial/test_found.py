"""Inputs that fuzzing once found, smallest first: each is refused in one line, or costs only itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.adversarial.bounds import survives
from tests.adversarial.fuzz_targets import CONFIG, STORE, load_weights, safetensors
from zero2all.checkpoint.flash import find_staged_slots
from zero2all.errors import Z2aError
from zero2all.io import read_json
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
    good = b'{"step": 1, "lineage": null, "hash": null, "state": null}'
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
