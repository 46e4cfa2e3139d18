"""Runs that begin with pretrained weights: ``train.init``."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.checkpoint.helpers import flip_a_bit, losses
from tests.checkpoint.test_foreign_checkpoints import change as change_metadata
from tests.conftest import tiny_recipe
from tests.parallel.helpers import full, make_model
from tests.ranks import on_ranks
from tests.train.commands import refused, z2a
from tests.train.runs import events
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import write_json
from zero2all.checkpoint import CheckpointWeights, InitialWeights
from zero2all.model import HFWeights, Z2all, export_hf, load_hf, load_model
from zero2all.model.hf_config import from_hf_config
from zero2all.model.weights import WeightReader, load_weights
from zero2all.parallel.sharded_init import to_local
from zero2all.recipe import ModelConfig, Recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokenizer.extend import extend_tokenizer
from zero2all.tokens import build_tokens
from zero2all.train import Run, Trainer, TrainerHooks, train
from zero2all.train.data_loader import Batch
from zero2all.train.initial_weights import config_changes, find_weights, plan_initial_weights

LOSS_TOLERANCE = 1e-4  # to transformers, in fp32
VOCABULARY = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "qwen2": {"rope_theta": 1e6},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [0],
    },
}


def write_hf(directory: Path, kind: str, tokenizer: Path, **more: Any) -> Any:
    """A model that transformers wrote, in several files, with a tokenizer; the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SHAPE, **ARCHITECTURES[kind], **more})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.eval().save_pretrained(directory, max_shard_size="60KB")
    shutil.copy(tokenizer / "tokenizer.json", directory)
    return model


def hf_recipe(directory: Path, workspace: Path, *overrides: str) -> Recipe:
    """A recipe that begins with a Hugging Face directory."""
    config = from_hf_config(json.loads((directory / "config.json").read_text()))
    model = json.dumps(config.model_dump(mode="json", exclude_defaults=True))
    return tiny_recipe(workspace, f"model={model}", f"train.init={directory}", *overrides)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.fixture(scope="module")
def source(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A trained run with checkpoints of steps 2 and 4. Nobody writes to it."""
    out = tmp_path_factory.mktemp("source")
    recipe = tiny_recipe(workspace, f"out={out}", "train.steps=4", "checkpoint.every=2 steps")
    train(recipe)
    return recipe


@pytest.fixture(scope="module")
def extended(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of the workspace with 4,000 more tokens."""
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(1500)]
    out = tmp_path_factory.mktemp("extended") / "tokenizer"
    extend_tokenizer(workspace / "tokenizer", [" ".join(words * 3)], 4000, out)
    return out


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_first_loss_is_that_of_transformers(kind: str, workspace: Path, tmp_path: Path) -> None:
    theirs = write_hf(tmp_path / "hf", kind, workspace / "tokenizer")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    batches: list[Batch] = []
    recipe = hf_recipe(tmp_path / "hf", workspace, f"out={tmp_path / 'out'}", "train.steps=1")
    train(recipe, hooks=TrainerHooks(on_batch=batches.append))
    [loss] = map(float, losses(Run.open(recipe.run_dir)).values())
    with torch.inference_mode():
        logits = theirs(batches[0].inputs).logits.flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(logits, batches[0].targets.flatten())
    assert loss == pytest.approx(expected.item(), abs=LOSS_TOLERANCE)
    assert abs(loss - math.log(VOCABULARY)) > 0.1  # not that of a model with small random weights


@pytest.mark.parametrize(("given", "step"), [("", 4), ("run", 4), ("run/checkpoints/step-00000002", 2)])
def test_weights_of_a_run_are_bitwise_equal(
    given: str, step: int, source: Recipe, workspace: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(workspace, f"out={tmp_path}", f"train.init={source.out / given}", "seed=99", "train.steps=3")
    with Trainer(recipe) as trainer:
        assert trainer.progress.first_step == 0
        assert not any(optimizer.state for optimizer in trainer.job.optimizers)
        assert_equal(weights_of(trainer.job.model.model), weights_of(Run.open(source.out).load_model(step)))
        summary = trainer.train()
    assert (summary.resumed_at, summary.steps) == (0, 3)
    saved = Run.open(tmp_path).initial_weights()
    path = source.run_dir / "checkpoints" / f"step-{step:08}"
    assert saved is not None
    assert saved == InitialWeights(str(path), step, "float32", 0, [], saved.fingerprint)
    assert len(saved.fingerprint or "") == 16
    assert Run.open(tmp_path).recipe.train.init == source.out / given
    assert json.loads((tmp_path / "run" / "identity.json").read_text())["init"] == str(source.out / given)
    [event] = events(Run.open(tmp_path), "initial weights")
    assert (event["path"], event["fingerprint"]) == (str(path), saved.fingerprint)


def test_weights_in_bf16_are_exact_and_have_a_fingerprint(source: Recipe, workspace: Path, tmp_path: Path) -> None:
    model = Run.open(source.out).load_model()
    records = []
    for name, dtype in (("one", torch.bfloat16), ("again", torch.bfloat16), ("other", torch.float16)):
        directory = tmp_path / name
        directory.mkdir()
        export_hf(model, directory, dtype=dtype)
        shutil.copy(workspace / "tokenizer" / "tokenizer.json", directory)
        recipe = tiny_recipe(workspace, f"out={directory}", f"train.init={directory}", "train.steps=1")
        with Trainer(recipe) as trainer:
            assert trainer.job.initial_weights is not None
            records.append(trainer.job.initial_weights)
            assert trainer.job.model.model.norm.weight.dtype == torch.float32
            assert_equal(weights_of(trainer.job.model.model), weights_of(load_hf(directory)))
    assert [record.dtype for record in records] == ["bfloat16", "bfloat16", "float16"]
    assert records[0].fingerprint == records[1].fingerprint != records[2].fingerprint


def test_a_resumed_run_does_not_read_the_initial_weights_again(source: Recipe, workspace: Path, tmp_path: Path) -> None:
    shutil.copytree(source.out, tmp_path / "source")
    overrides = [f"out={tmp_path}", f"train.init={tmp_path / 'source'}"]
    train(tiny_recipe(workspace, *overrides, "train.steps=2", "train.schedule.shape=constant"))
    expected = weights_of(Run.open(tmp_path).load_model())
    shutil.rmtree(tmp_path / "source")
    longer = tiny_recipe(workspace, *overrides, "train.steps=3", "train.schedule.shape=constant")
    with Trainer(longer) as trainer:
        assert (trainer.progress.first_step, trainer.job.initial_weights) == (2, None)
        assert_equal(weights_of(trainer.job.model.model), expected)
        trainer.train()
    assert Run.open(tmp_path).initial_weights() is not None
    other = tiny_recipe(workspace, f"out={tmp_path}", f"train.init={source.out}", "train.steps=3")
    with pytest.raises(
        UsageError, match=rf"train\.init={tmp_path / 'source'}, not {source.out}\. Set the recipe as it was"
    ):
        train(other)


def test_4000_more_tokens_leave_the_logits_of_old_ones_unchanged(
    source: Recipe, extended: Path, workspace: Path, tmp_path: Path
) -> None:
    grown = Tokenizer(extended)
    assert grown.vocab_size >= VOCABULARY + 4000
    build_tokens(source.tokens, source.documents_dir, extended, tmp_path / "tokens")
    recipe = tiny_recipe(
        workspace, f"out={tmp_path}", f"train.init={source.out}", f"tokenizer.dir={extended}",
        f"tokens.dir={tmp_path / 'tokens'}", "train.steps=1",
    )  # fmt: skip
    ids = torch.tensor([grown.encode("the model reads a line 春眠不觉晓")])
    assert int(ids.max()) < VOCABULARY
    old = Run.open(source.out).load_model()
    with Trainer(recipe) as trainer:
        model = trainer.job.model.model
        assert trainer.job.initial_weights is not None
        assert trainer.job.initial_weights.new_tokens == grown.vocab_size - VOCABULARY
        with torch.no_grad():
            assert torch.equal(model(ids)[..., :VOCABULARY], old(ids))
        parts = Tokenizer(workspace / "tokenizer").encode_bytes(grown.token_bytes[VOCABULARY])
        assert len(parts) == 2  # the first new token is one merge of old ones
        for table, before in ((model.embed_tokens, old.embed_tokens), (model.lm_head, old.lm_head)):
            torch.testing.assert_close(table.weight[VOCABULARY], before.weight[parts].mean(0))
        trainer.train()


def test_rows_that_a_new_token_takes_over_start_as_the_mean_of_its_parts(
    extended: Path, workspace: Path, tmp_path: Path
) -> None:
    """Many models have more rows than their tokenizer has tokens, and new tokens come there first."""
    old, new = Tokenizer(workspace / "tokenizer"), Tokenizer(extended)
    rows = VOCABULARY + 100
    directory = tmp_path / "padded"
    write_hf(directory, "qwen3", workspace / "tokenizer", vocab_size=rows)
    config = from_hf_config(json.loads((directory / "config.json").read_text()))
    larger = config.model_copy(update={"vocab_size": new.vocab_size + 10})
    plan = plan_initial_weights(find_weights(directory), larger, new)
    stored = load_hf(directory).embed_tokens.weight.detach()
    found = plan.reader.read("embed_tokens.weight", (0, 0), (larger.padded_vocab_size, 32))
    assert torch.equal(found[:VOCABULARY], stored[:VOCABULARY])
    for token in (VOCABULARY, VOCABULARY + 50):
        assert not torch.equal(found[token], stored[token])
    torch.testing.assert_close(found[new.vocab_size + 3], stored[:VOCABULARY].mean(0))
    assert not found[larger.vocab_size :].any()
    # With the old tokenizer, unused rows stay as they are.
    kept = plan_initial_weights(find_weights(directory), config, old).reader
    assert torch.equal(
        kept.read("lm_head.weight", (VOCABULARY, 0), (100, 32)), load_hf(directory).lm_head.weight[512:612]
    )
    # A part is what it is in the full matrix.
    part = plan.reader.read("embed_tokens.weight", (500, 8), (40, 16))
    assert torch.equal(part, found[500:540, 8:24])


def test_a_sibling_begins_with_the_run_beside_it(out: Path, recipe: Path) -> None:
    z2a("train", recipe, f"train.init={out}", "--name", "second")
    second = Run.open(out / "second").initial_weights()
    assert second is not None
    assert (second.step, Path(second.path).parents[1]) == (2, out / "run")
    assert "train.init=None, not" in refused("train", recipe, f"train.init={out}")
    z2a("train", out / "second", "--name", "third")  # the recipe of a run has its train.init
    third = Run.open(out / "third").initial_weights()
    assert third == second


def test_a_plan_and_a_recipe_check_say_what_a_run_would_begin_with(out: Path, recipe: Path) -> None:
    text = z2a("plan", recipe, f"train.init={out}", "run=second", "--gpus", "1")
    assert f"initial weights: {out}/run/checkpoints/step-00000002, stored in float32" in text
    assert not (out / "second").exists()
    z2a("recipe", "check", recipe, f"train.init={out}")
    wrong = ["model.num_hidden_layers=1", f"train.init={out}"]
    assert "model.num_hidden_layers=2, not 1" in z2a("plan", recipe, *wrong, "run=x", "--gpus", "1")
    assert "model.num_hidden_layers=2, not 1" in refused("recipe", "check", recipe, *wrong)
    assert "does not exist" in refused("recipe", "check", recipe, f"train.init={out}/none")


def test_plan_reads_a_hugging_face_directory(workspace: Path, tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", "qwen3_moe", workspace / "tokenizer")
    shown = json.loads(z2a("plan", tmp_path / "hf", "--layers", "--json"))
    model = load_hf(tmp_path / "hf")
    assert shown["model"]["parameters"]["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert shown["weights"]["dtype"] == "float32"
    assert shown["weights"]["problem"] is None
    text = z2a("plan", tmp_path / "hf")
    section = text[text.index("  model:\n") : text.index("\n\nrun: ")]
    assert ModelConfig.model_validate(yaml.safe_load(section)["model"]) == model.config
    next((tmp_path / "hf").glob("model-*.safetensors")).unlink()
    assert "not usable" in z2a("plan", tmp_path / "hf")


MODEL_CHANGES = {
    "tie_word_embeddings=true": r"model\.tie_word_embeddings=False, not True",
    "qk_norm=true": r"model\.qk_norm=False, not True",
    "num_hidden_layers=3": r"model\.num_hidden_layers=2, not 3",
    "rope_theta=500": r"model\.rope_theta=10000\.0, not 500\.0",
    "head_dim=16": r"model\.head_dim=8, not 16",
    "moe={num_experts: 2, num_experts_per_tok: 1, moe_intermediate_size: 8}": r"model\.moe=None, not",
}


@pytest.mark.parametrize("change", MODEL_CHANGES)
def test_another_model_is_refused_with_the_keys(change: str, source: Recipe, workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace, f"out={tmp_path}", f"train.init={source.out}", f"model.{change}")
    with pytest.raises(UsageError, match=rf"^train\.init: .*{MODEL_CHANGES[change]}.*'z2a plan"):
        train(recipe)
    assert not (tmp_path / "run" / "identity.json").exists()


def test_what_does_not_change_the_logits_may_differ(source: Recipe, workspace: Path, tmp_path: Path) -> None:
    changes = ["max_position_embeddings=128", "z_loss=1e-4", "mtp_weight=0.3", "head_dim=8", "initializer_range=0.01"]
    recipe = tiny_recipe(workspace, f"out={tmp_path}", f"train.init={source.out}", *(f"model.{one}" for one in changes))
    with Trainer(recipe) as trainer:
        assert trainer.job.initial_weights is not None
        assert {name.split(".")[0] for name in trainer.job.initial_weights.seeded} == {"mtp"}
        found = weights_of(trainer.job.model.model)
        expected = weights_of(Run.open(source.out).load_model())
        assert_equal({name: found[name] for name in expected}, expected)


def test_an_expert_bias_is_neither_lost_nor_needed(workspace: Path, tmp_path: Path) -> None:
    directory = tmp_path / "moe"
    write_hf(directory, "qwen3_moe", workspace / "tokenizer")
    tokenizer, stored = Tokenizer(workspace / "tokenizer"), HFWeights(directory).config
    assert stored.moe is not None
    biased = stored.model_copy(update={"moe": stored.moe.model_copy(update={"load_balancing": "bias"})})
    plan = plan_initial_weights(find_weights(directory), biased, tokenizer)
    assert plan.record.seeded == ["layers.1.mlp.bias"]
    assert config_changes(biased, stored) == ["model.moe.load_balancing=bias, not aux"]


def test_another_tokenizer_is_refused(source: Recipe, workspace: Path, tmp_path: Path) -> None:
    definition = json.loads((workspace / "tokenizer" / "tokenizer.json").read_text())
    ids = definition["model"]["vocab"]
    one, other = (next(name for name, id in ids.items() if id == wanted) for wanted in (300, 301))
    ids[one], ids[other] = 301, 300
    write_json(tmp_path / "other" / "tokenizer.json", definition)
    other_tokenizer, config = Tokenizer(tmp_path / "other"), Run.open(source.out).load_model().config
    location = find_weights(source.out)
    with pytest.raises(UsageError, match=r"token 300 is .* but .*z2a tokenizer extend"):
        plan_initial_weights(location, config, other_tokenizer)
    # A checkpoint that was copied without its run has no tokenizer beside it.
    path = tmp_path / "step-00000004"
    shutil.copytree(location.path, path)
    with pytest.raises(UsageError, match="give the directory of the run"):
        plan_initial_weights(find_weights(path), config, other_tokenizer)
    assert plan_initial_weights(find_weights(path), config, Tokenizer(workspace / "tokenizer")).record.step == 4


def test_a_vocabulary_that_does_not_fit_is_refused(extended: Path, workspace: Path, tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", "llama", workspace / "tokenizer")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    location, config = find_weights(tmp_path / "hf"), HFWeights(tmp_path / "hf").config
    tokenizer, larger = Tokenizer(workspace / "tokenizer"), Tokenizer(extended)
    with pytest.raises(UsageError, match=r"set model\.vocab_size=512"):
        plan_initial_weights(location, config.model_copy(update={"vocab_size": 511}), tokenizer)
    with pytest.raises(UsageError, match=r"copy its tokenizer\.json there"):
        plan_initial_weights(location, config.model_copy(update={"vocab_size": larger.vocab_size}), larger)
    assert plan_initial_weights(location, config, tokenizer).record.new_tokens == 0  # with a warning


def test_places_without_weights_are_refused(source: Recipe, workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.safetensors").touch()
    shutil.copytree(source.out / "run", tmp_path / "unsaved" / "run", ignore=shutil.ignore_patterns("step-*"))
    for place, message in {
        "empty": "is not the directory of a run",
        "file.safetensors": "is a file: give its directory",
        "none": "does not exist",
        "unsaved": "has no checkpoint yet",
        "run/checkpoints/step-00000009": r"manifest\.json is missing",
    }.items():
        with pytest.raises(Z2aError, match=message):
            train(tiny_recipe(workspace, f"out={tmp_path / 'out'}", f"train.init={tmp_path / place}"))
    with pytest.raises(UsageError, match="z2a corpus fetch"):
        find_weights(tiny_recipe(workspace, "train.init=hf://owner/name").train.init or Path())


def test_a_damaged_checkpoint_is_refused_with_the_file(source: Recipe, workspace: Path, tmp_path: Path) -> None:
    shutil.copytree(source.run_dir, tmp_path / "source")
    step = tmp_path / "source" / "checkpoints" / "step-00000004"
    [data] = step.glob("*.distcp")
    flip_a_bit(data)
    recipe = tiny_recipe(workspace, f"out={tmp_path / 'out'}", f"train.init={tmp_path / 'source'}")
    with pytest.raises(Z2aError, match=rf"step-00000004 cannot be used: {data.name} does not match its checksum"):
        train(recipe)
    data.write_bytes(data.read_bytes()[:-10])
    with pytest.raises(Z2aError, match=rf"{data.name} has \d+ bytes instead of"):
        train(recipe)


def test_a_checkpoint_without_a_part_of_a_tensor_is_refused(source: Recipe, workspace: Path, tmp_path: Path) -> None:
    """Its checksums say nothing of that: whoever writes a checkpoint writes them too."""
    shutil.copytree(source.run_dir, tmp_path / "source")

    def leave_out(metadata: Any) -> Any:
        metadata.state_dict_metadata["model.norm.weight"].chunks.clear()
        return metadata

    step = tmp_path / "source" / "checkpoints" / "step-00000004"
    change_metadata(step, leave_out)
    manifest = json.loads((step / "manifest.json").read_text())
    write_json(step / "manifest.json", {**manifest, "sizes": {}})
    with pytest.raises(Z2aError, match=r"has only a part of model\.norm\.weight"):
        train(tiny_recipe(workspace, f"out={tmp_path / 'out'}", f"train.init={tmp_path / 'source'}"))


def test_weights_that_are_not_finite_or_changed_after_export_are_refused(
    source: Recipe, workspace: Path, tmp_path: Path
) -> None:
    hf = tmp_path / "hf"
    z2a("export", source.out, "--to", hf)
    recipe = tiny_recipe(workspace, f"out={tmp_path / 'out'}", f"train.init={hf}")
    weights = load_file(hf / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, hf / "model.safetensors")
    with pytest.raises(Z2aError, match=r"model\.safetensors does not match its checksum in manifest\.json"):
        train(recipe)
    (hf / "manifest.json").unlink()
    with pytest.raises(Z2aError, match=rf"{hf} cannot be used: norm\.weight has values that are not finite"):
        train(recipe)


def test_a_checkpoint_is_read_in_any_parts(source: Recipe) -> None:
    weights = CheckpointWeights(find_weights(source.out).path)
    expected = Run.open(source.out).load_model()
    assert_equal(weights_of(load_model(weights)), weights_of(expected))
    full = expected.layers[1].mlp.up_proj.weight  # type: ignore[union-attr]
    part = weights.read("layers.1.mlp.up_proj.weight", (5, 7), (11, 3))
    assert torch.equal(part, full[5:16, 7:10])
    assert weights.shape("layers.1.mlp.none") is None


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"dp_shard": 2}),
    ("qwen3", {"tp": 2, "dp_shard": 1}),
    ("qwen3", {"pp": 2, "dp_shard": 1}),
    ("qwen3", {"cp": 2}),
    ("qwen3", {"dp_replicate": 2}),
    ("llama", {"tp": 2, "dp_shard": 1}),
    ("qwen3_moe", {"dp_shard": 2, "ep": 2}),
    ("qwen3_moe", {"dp_shard": 2}),
]


class CountingReader:
    """Weights that count the values that are read."""

    def __init__(self, reader: WeightReader) -> None:
        self.config, self.shape, self._reader, self.values = reader.config, reader.shape, reader, 0

    def read(self, name: str, begin: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        self.values += math.prod(size)
        return self._reader.read(name, begin, size)


def load_on_ranks(root: Path, tokenizer: Path) -> None:
    """Every layout with a grown vocabulary: the shards of a rank are those of one process."""
    for kind, sizes in LAYOUTS:
        new = Tokenizer(tokenizer)
        config = HFWeights(root / kind).config.model_copy(update={"vocab_size": new.vocab_size})
        plan = plan_initial_weights(find_weights(root / kind), config, new)
        expected = Z2all(config).init_weights(0).state_dict()
        load_weights(expected, plan.reader)
        model = make_model(sizes, config, seed=1)
        reader = CountingReader(plan.reader)
        model.load_weights(reader)
        held = sum(to_local(parameter).numel() for parameter in model.model.parameters())
        assert reader.values == held, (kind, sizes)  # nothing of other ranks
        for name, weight in model.model.state_dict().items():
            assert torch.equal(full(weight), expected[name]), (kind, sizes, name)


@pytest.mark.long
def test_every_layout_loads_the_same_weights(extended: Path, workspace: Path, tmp_path: Path) -> None:
    for kind in ("qwen3", "llama", "qwen3_moe"):
        write_hf(tmp_path / kind, kind, workspace / "tokenizer")
    on_ranks(2, load_on_ranks, tmp_path, extended, detail=False)
