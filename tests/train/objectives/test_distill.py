"""Distillation: the distance to a teacher, its cache, and that a student learns more from the same tokens."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.checkpoint.helpers import losses
from tests.conftest import tiny_recipe
from tests.ranks import on_ranks
from zero2all.base.errors import RecipeError
from zero2all.checkpoint import RankGroup
from zero2all.corpus import build_corpus
from zero2all.evals import evaluate_bpb
from zero2all.export import export_run
from zero2all.model.ops.cross_entropy import HeadConfig, likeliest_tokens, soft_cross_entropy
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.parallel.sharded_init import to_local
from zero2all.recipe import ParallelRecipe, Recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import build_tokens
from zero2all.train import Run, train
from zero2all.train.objectives.distill import Teacher, TeacherCacheKey, TeacherIdentity, teacher_dtype
from zero2all.train.run import resolve_model_config


@pytest.fixture(scope="module")
def teacher(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained_teacher(workspace, tmp_path_factory.mktemp("teacher"), steps=10)


def trained_teacher(workspace: Path, out: Path, steps: int) -> Run:
    words = [f"train.steps={steps}", "model.hidden_size=64", f"checkpoint.every={steps} steps"]
    recipe = tiny_recipe(workspace, f"out={out}", *words)
    train(recipe)
    return Run.open(recipe.run_dir)


def student(workspace: Path, teacher: Run, out: Path, *overrides: str) -> Recipe:
    distill = f"{{teacher: {teacher.directory}, weight: 0.9, top_k: 32}}"
    return tiny_recipe(
        workspace, f"out={out}", "train.objective.name=distill", f"train.objective.distill={distill}", *overrides
    )


def test_the_distance_is_the_divergence_of_the_distributions() -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((9, 8), (32, 8)))
    logits = torch.randn(9, 30, generator=generator)
    ids, logps = likeliest_tokens(logits, 30)
    found = soft_cross_entropy(x, weight, ids, logps, HeadConfig(30))
    own = F.log_softmax((x @ weight.T)[:, :30], dim=-1)
    expected = F.kl_div(own, F.log_softmax(logits, dim=-1), reduction="none", log_target=True).sum(-1)
    assert torch.allclose(found, expected, atol=2e-5)
    found_gradients = torch.autograd.grad(found.sum(), (x, weight), retain_graph=True)
    for one, other in zip(found_gradients, torch.autograd.grad(expected.sum(), (x, weight)), strict=True):
        assert torch.allclose(one, other, atol=2e-5)
    few_ids, few_logps = likeliest_tokens(logits, 5)
    few = soft_cross_entropy(x, weight, few_ids, few_logps, HeadConfig(30))
    assert (few <= found + 1e-5).all(), "joining outcomes never adds to a divergence"
    assert (few >= -1e-6).all()


def test_the_recorded_loss_is_that_of_the_right_tokens(workspace: Path, teacher: Run, tmp_path: Path) -> None:
    recipe = student(workspace, teacher, tmp_path / "with", "train.steps=3")
    plain = tiny_recipe(workspace, f"out={tmp_path}/without", "train.steps=3")
    for one in (recipe, plain):
        train(one)
    with_teacher, without = (losses(Run.open(one.run_dir)) for one in (recipe, plain))
    assert with_teacher[0] == without[0]
    assert with_teacher[2] != without[2]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows that the teacher is asked for."""
    found: list[int] = []
    original = Teacher.likeliest

    def count(self: Teacher, *args: Any) -> Any:
        found.append(len(args[0]))
        return original(self, *args)

    monkeypatch.setattr(Teacher, "likeliest", count)
    return found


def test_the_teacher_is_asked_once(workspace: Path, teacher: Run, tmp_path: Path, asked: list[int]) -> None:
    recipe = student(workspace, teacher, tmp_path, "train.steps=3")
    train(recipe)
    assert sum(asked) == 3 * 8
    again = recipe.model_copy(update={"run": "again"})
    train(again)
    assert sum(asked) == 3 * 8
    assert losses(Run.open(again.run_dir)) == losses(Run.open(recipe.run_dir))


def test_the_cache_of_a_different_context_is_not_read(
    workspace: Path, teacher: Run, tmp_path: Path, asked: list[int]
) -> None:
    """The same rows with and without a document mask: the teacher sees different tokens before each."""
    runs = {}
    for name, out, mask in (("plain", "one", False), ("masked", "one", True), ("alone", "two", True)):
        recipe = student(workspace, teacher, tmp_path / out, "train.steps=2", f"train.document_mask={mask}".lower())
        recipe = recipe.model_copy(update={"run": name})
        train(recipe)
        runs[name] = losses(Run.open(recipe.run_dir))
    assert sum(asked) == 3 * 2 * 8
    assert runs["masked"] == runs["alone"]
    assert runs["masked"][1] != runs["plain"][1]


def test_the_key_of_the_cache_covers_what_the_teacher_computes() -> None:
    """Every field: one that is added later must change it too."""

    def names(key: TeacherCacheKey) -> set[str]:
        identity = {field.name: changed(getattr(key.teacher, field.name)) for field in fields(key.teacher)}
        others = {field.name: changed(getattr(key, field.name)) for field in fields(key) if field.name != "teacher"}
        made = [replace(key, teacher=replace(key.teacher, **{name: value})) for name, value in identity.items()]
        return {one.name for one in [key, *made, *(replace(key, **{name: value}) for name, value in others.items())]}

    def changed(value: Any) -> Any:
        return {**value, "rope_theta": 1.0} if isinstance(value, dict) else value + type(value)("1")

    key = TeacherCacheKey(TeacherIdentity("w", {"rope_theta": 5e5}, "fp32", "cpu"), "s", 64, 8, False, False)
    assert {"dtype", "config", "weights", "device"} <= {field.name for field in fields(key.teacher)}
    assert {"masks_documents", "end_of_text_first", "samples"} <= {field.name for field in fields(key)}
    assert len(names(key)) == len(fields(key)) + len(fields(key.teacher))


def test_mistakes_are_named(workspace: Path, teacher: Run, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="needs a teacher"):
        tiny_recipe(workspace, f"out={tmp_path}", "train.objective.name=distill")
    with pytest.raises(RecipeError, match="objective distill does not support tensor_parallel"):
        student(workspace, teacher, tmp_path, "parallel.tp=2")


def test_a_student_learns_from_its_own_answers(workspace: Path, teacher: Run, tmp_path: Path) -> None:
    records = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "the model"}]}
        for n in range(40)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    sources = [{"name": "chat", "kind": "chat", "paths": [f"{tmp_path}/chat.jsonl"]}]
    recipe = student(
        workspace, teacher, tmp_path / "out", f"corpus.sources={json.dumps(sources)}", "corpus.dir=null",
        "tokens.dir=null", "train.steps=3", "train.objective.distill.on_policy=true",
        "train.objective.max_answer_tokens=8",
    )  # fmt: skip
    build_corpus(recipe.corpus, recipe.documents_dir)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    train(recipe)
    assert len(losses(Run.open(recipe.run_dir))) == 3


@pytest.mark.slow
@pytest.mark.long
def test_with_a_teacher_the_same_tokens_teach_more(workspace: Path, tmp_path: Path) -> None:
    """Three seeds each, at equal tokens."""
    teacher = trained_teacher(workspace, tmp_path / "teacher", steps=400)
    bits: dict[str, list[float]] = {"with": [], "without": []}
    for seed in (1, 2, 3):
        options = ["train.steps=40", f"seed={seed}", "checkpoint.every=40 steps"]
        recipes = {
            "with": student(workspace, teacher, tmp_path / f"with{seed}", *options),
            "without": tiny_recipe(workspace, f"out={tmp_path}/without{seed}", *options),
        }
        for name, recipe in recipes.items():
            train(recipe)
            run = Run.open(recipe.run_dir)
            bits[name].append(evaluate_bpb(run.load_model(), run.tokenizer(), recipe).bits_per_byte)
    assert mean(bits["with"]) < mean(bits["without"]), bits
    assert max(bits["with"]) < min(bits["without"]), bits


def test_other_weights_at_the_same_path_are_another_teacher(workspace: Path, teacher: Run, tmp_path: Path) -> None:
    """What an earlier teacher expected must not be read for a run that was trained again."""
    export_run(teacher, tmp_path / "hf")
    place = f"train.objective.distill.teacher={tmp_path}/hf"
    recipe = student(workspace, teacher, tmp_path / "out", place, "train.steps=1")
    train(recipe)
    shutil.rmtree(tmp_path / "hf")
    export_run(teacher, tmp_path / "hf", dtype="bf16")
    train(recipe.model_copy(update={"run": "again"}))
    assert len(list((tmp_path / "out" / "teacher").iterdir())) == 2


def likeliest_on_ranks(path: Path, recipe: Recipe) -> dict[str, Any]:
    """What the teacher expects of this rank's rows: rank 1 has none. And what this rank holds of its weights."""
    mesh = ParallelMesh.init_distributed(recipe.parallel, torch.device("cpu"))
    model = ParallelModel(resolve_model_config(recipe, Tokenizer(recipe.tokenizer_dir)), recipe.parallel, mesh, seed=0)
    teacher = Teacher(path, model, 4, RankGroup())
    rows = ROWS[: len(ROWS) if mesh.dp_rank == 0 else 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero2all.train.objectives.distill.BATCH_TOKENS", 32)  # three passes for rank 0, none for rank 1
        ids, logps = teacher.likeliest(rows, None)
    parameters = list(teacher.model.parameters())
    return {
        "ids": ids, "logps": logps, "trained": any(one.requires_grad for one in parameters),
        "held": sum(to_local(one).numel() for one in parameters), "all": sum(one.numel() for one in parameters),
    }  # fmt: skip


ROWS = torch.randint(1, 200, (3, 32), generator=torch.Generator().manual_seed(1))


def test_a_teacher_is_sharded_like_the_student(workspace: Path, teacher: Run, tmp_path: Path) -> None:
    recipe = student(workspace, teacher, tmp_path)
    alone = likeliest_on_ranks(teacher.directory, recipe)
    logits = teacher.load_model()(ROWS)
    ids, logps = likeliest_tokens(logits, 4)
    assert torch.equal(alone["ids"], ids)
    assert torch.allclose(alone["logps"], logps, atol=1e-5)
    sharded = recipe.model_copy(update={"parallel": ParallelRecipe(dp_shard=2)})
    first, second = on_ranks(2, likeliest_on_ranks, teacher.directory, sharded)
    assert torch.equal(first["ids"], ids)
    assert torch.allclose(first["logps"], logps, atol=1e-5)
    assert second["ids"].shape == (0, 32, 4)
    for found in (first, second):
        assert not found["trained"]
        assert found["held"] <= 0.55 * found["all"]


def test_a_teacher_is_in_bf16_on_gpus() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert teacher_dtype(torch.bfloat16, cuda) == torch.bfloat16
    assert teacher_dtype(torch.float32, cuda) == teacher_dtype(torch.bfloat16, cpu) == torch.float32
