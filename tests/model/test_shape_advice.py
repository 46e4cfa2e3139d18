from __future__ import annotations

import pytest

from zero2all.base.machine.gpu_specs import GPUS
from zero2all.model.cost.shape_advice import Advice, advise_shapes, model_matmuls
from zero2all.recipe import Recipe

A100, H100, V100 = (GPUS[name] for name in ("A100", "H100", "V100"))
GOOD = {"preset": "z2all-1.1b"}


def recipe(seq_len: int = 2048, batch_tokens: int = 8192, **model: object) -> Recipe:
    train = {"steps": 1, "seq_len": seq_len, "batch_tokens": batch_tokens}
    return Recipe.model_validate({"model": {**GOOD, **model}, "train": train})


def about(advice: list[Advice]) -> dict[str, int]:
    return {one.field: one.better for one in advice}


def test_the_reference_shape_needs_no_advice() -> None:
    assert advise_shapes(recipe(), A100) == []


@pytest.mark.parametrize(
    ("changes", "field", "better"),
    [
        ({"intermediate_size": 5461}, "model.intermediate_size", 5504),
        (
            {"hidden_size": 2000, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128},
            "model.hidden_size",
            2048,
        ),
        ({"num_attention_heads": 64, "num_key_value_heads": 8}, "model.num_attention_heads", 32),
        ({"head_dim": 80}, "model.head_dim", 64),
    ],
)
def test_a_size_that_tensor_cores_dislike_gets_the_next_good_one(
    changes: dict[str, object], field: str, better: int
) -> None:
    assert about(advise_shapes(recipe(**changes), A100))[field] == better


def test_older_gpus_are_content_with_multiples_of_eight() -> None:
    aligned = {"intermediate_size": 5464}
    assert "model.intermediate_size" in about(advise_shapes(recipe(**aligned), A100))
    assert "model.intermediate_size" not in about(advise_shapes(recipe(**aligned), V100))


def test_tiles_and_waves_by_hand() -> None:
    """4096 rows and 5632 columns are 32 x 22 tiles of 128 x 256: 704 tiles, 6.52 waves of 108, so 7 rounds."""
    up = next(product for product in model_matmuls(recipe().model, 4096, A100) if product.name == "gate_proj, up_proj")
    assert (up.tiles, round(up.waves, 2)) == (704, 6.52)
    assert up.filled == pytest.approx(704 / (7 * 108))


def test_one_tile_too_many_costs_a_wave_and_is_reported() -> None:
    """With 1,536 rows a width of 2,304 is 108 tiles, all of an A100; 2,368 is 120, which takes two rounds."""
    advice = advise_shapes(recipe(1536, 1536, intermediate_size=2368), A100)
    [found] = [one for one in advice if one.field == "model.intermediate_size"]
    assert found.better == 2304
    assert "100% of A100's 108 multiprocessors busy instead of" in found.why


def test_too_small_a_micro_batch_leaves_multiprocessors_idle() -> None:
    advice = about(advise_shapes(recipe(128, 256), H100))
    assert advice["train.micro_batch_tokens"] > 1024
    assert advice["train.micro_batch_tokens"] % 128 == 0
