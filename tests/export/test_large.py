"""A model that was saved by several ranks is exported by one process with little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_recipe
from tests.ranks import on_ranks
from zero2all.model import Z2all, export_hf
from zero2all.model.cost.model_size import count_parameters
from zero2all.recipe import ModelConfig
from zero2all.train import Run, train

EXPORT = """
import json, sys
from pathlib import Path
from zero2all.export import export_run
from zero2all.train import Run
result = export_run(Run.open(sys.argv[1]), Path(sys.argv[2]), format=sys.argv[3], dtype="bf16", check=False)
# Not ru_maxrss, which a process inherits from the one that started it.
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps([result.parameters, int(peak) * 1024]))
"""
SHAPE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}


@pytest.mark.slow
@pytest.mark.long
def test_1100m_parameters_of_four_ranks_in_less_than_one_and_a_half_times_their_bytes(
    workspace: Path, tmp_path: Path
) -> None:
    if os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") < 15 << 30:
        pytest.skip("four ranks with 1.1B parameters need 15 GB of memory")
    # Adapters alone are trained, from random weights, so that four ranks fit into a small machine; the checkpoint has
    # all weights.
    shape = {**SHAPE, "num_key_value_heads": 8, "vocab_size": 64320, "max_position_embeddings": 2048}
    (tmp_path / "init").mkdir()
    model = Z2all(ModelConfig.model_validate(shape)).init_weights(0)
    export_hf(model, tmp_path / "init", dtype=torch.bfloat16)
    del model
    recipe = tiny_recipe(
        workspace, f"out={tmp_path}", "train.steps=1", "train.seq_len=32", "train.batch_tokens=128",
        "train.micro_batch_tokens=32", f"model={json.dumps({**shape, 'lora': {'rank': 1}})}", "parallel.dp_shard=4",
        f"train.init={tmp_path}/init", "checkpoint.flash_every=null", "evals.every=null",
    )  # fmt: skip
    on_ranks(4, train, recipe, seconds=1500, detail=False)
    run = Run.open(recipe.run_dir)
    parameters = count_parameters(recipe.model.model_copy(update={"lora": None})).total
    assert parameters > 1.0e9
    for kind in ("hf", "gguf"):
        command = [sys.executable, "-c", EXPORT, str(run.directory), str(tmp_path / kind), kind]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200).stdout
        written, peak = json.loads(printed.splitlines()[-1])
        assert written == parameters
        assert peak < 1.5 * 2 * parameters, f"{kind}: {peak / (2 * parameters):.2f} times the bytes in bf16"
        sys.stderr.write(f"{kind}: peak {peak / 1e9:.2f} GB, {peak / (2 * parameters):.2f} times the bytes in bf16\n")
