"""Presets with the shape of a published model have its number of parameters, as transformers counts them."""

from __future__ import annotations

import pytest
import torch

from zero2all.model import Z2all
from zero2all.model.cost.model_size import count_parameters
from zero2all.model.hf_config import hf_config, hf_incompatibility
from zero2all.recipe import PRESETS, ModelConfig

PUBLISHED = {
    "7b": 6_738_415_616,  # https://huggingface.co/meta-llama/Llama-2-7b-hf
    "13b": 13_015_864_320,  # https://huggingface.co/meta-llama/Llama-2-13b-hf
    "30b": 32_528_943_616,  # https://arxiv.org/abs/2302.13971, table 2: 32.5B
    "70b": 68_976_648_192,  # https://huggingface.co/meta-llama/Llama-2-70b-hf
    "30b-a3b": 30_532_122_624,  # https://huggingface.co/Qwen/Qwen3-30B-A3B
}


def test_all_published_shapes_are_checked() -> None:
    assert set(PUBLISHED) == {name for name in PRESETS if not name.startswith("z2all-")}


@pytest.mark.parametrize(("preset", "parameters"), PUBLISHED.items())
def test_published_shapes_have_the_published_number_of_parameters(preset: str, parameters: int) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = ModelConfig(preset=preset)
    assert count_parameters(config).total == parameters
    assert hf_incompatibility(config) is None
    values = hf_config(config)
    with torch.device("meta"):
        ours, theirs = Z2all(config), AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    assert sum(parameter.numel() for parameter in ours.parameters()) == parameters
    assert theirs.num_parameters() == parameters


def test_experts_that_a_token_does_not_use_are_not_active() -> None:
    assert count_parameters(ModelConfig(preset="30b-a3b")).active == 3_353_032_704
