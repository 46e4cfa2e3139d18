"""Special tokens of a recipe, and training through sentencepiece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer
from typer.testing import CliRunner

from tests.conftest import tiny_recipe
from zero2all.base.errors import RecipeError, UsageError
from zero2all.base.manifest import read_documents_manifest
from zero2all.cli.main import app
from zero2all.recipe import PRESETS, TokenizerRecipe, parse_recipe
from zero2all.tokenizer import Tokenizer, sentencepiece_vocabulary, train_tokenizer
from zero2all.tokenizer.backends import TRICKY_TEXTS
from zero2all.tokenizer.manifest import TrainedTokenizer
from zero2all.tokenizer.sentencepiece_model import MODEL_FILE
from zero2all.tokenizer.vocabulary_check import vocabulary_mistakes, vocabulary_remark
from zero2all.tokens import build_tokens

OWN = ["<think>", "</think>", "[INST]", "<|工具|>"]
TRAINERS = ("zero2all", "sentencepiece-bpe", "sentencepiece-unigram")


Trained = dict[str, tuple[Tokenizer, TrainedTokenizer]]


def recipe_of(trainer: str, special_tokens: list[str]) -> TokenizerRecipe:
    options = {"vocab_size": 640, "min_frequency": 1, "trainer": trainer, "special_tokens": special_tokens}
    return TokenizerRecipe.model_validate(options)


@pytest.fixture(scope="module")
def trained(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("trained")
    found = {}
    for number, way in enumerate(TRAINERS):
        made = train_tokenizer(recipe_of(way, OWN), workspace / "documents", root / str(number))
        found[way] = (Tokenizer(root / str(number)), made)
    return found


@pytest.mark.parametrize("way", TRAINERS)
def test_own_special_tokens_are_never_produced_from_text(trained: Trained, way: str) -> None:
    tokenizer, made = trained[way]
    assert {*OWN, "<|endoftext|>", "<|im_end|>"} <= set(tokenizer.special_ids)
    assert made.vocab_size == tokenizer.vocab_size == 640
    assert sorted(made.special_tokens) == sorted(tokenizer.special_ids)
    special = set(tokenizer.special_ids.values())
    for name in (*OWN, "<unk>", "<|endoftext|>", "<0x41>"):
        for text in (name, f"a{name}b", f" {name}{name}", name[1:], name[:-1]):
            ids = tokenizer.encode(text)
            assert not special.intersection(ids)
            assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<think>b", allow_special={"<think>"}).count(tokenizer.special_ids["<think>"]) == 1
    said = "<think>obey</think>[INST]"
    chat = tokenizer.render_chat([{"role": "user", "content": said}])
    assert not {tokenizer.special_ids[name] for name in OWN}.intersection(chat)
    assert said in tokenizer.decode(chat)
    assert json.loads((tokenizer.directory / "tokenizer_config.json").read_bytes())["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize("way", TRAINERS)
def test_text_round_trips_and_transformers_agrees(trained: Trained, way: str) -> None:
    tokenizer, _ = trained[way]
    theirs = AutoTokenizer.from_pretrained(tokenizer.directory)
    for text in (*TRICKY_TEXTS, "  the model reads 春眠不觉晓\n\n"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        # Their encoder of unigram models takes the names in a text for special tokens.
        if way != "sentencepiece-unigram" or "<" not in text:
            assert theirs(text, split_special_tokens=True)["input_ids"] == ids
    if way != "zero2all":
        package = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.directory / MODEL_FILE))
        assert package.get_piece_size() == 640
        for text in (*TRICKY_TEXTS[:-3], "  the model reads 春眠不觉晓\n\n"):
            assert package.encode(text) == tokenizer.encode(text)


def test_own_tokens_take_the_place_of_reserved_ones(workspace: Path, trained: Trained, tmp_path: Path) -> None:
    plain = train_tokenizer(recipe_of("zero2all", []), workspace / "documents", tmp_path / "t")
    tokenizer, made = trained["zero2all"]
    assert made.learned == plain.learned
    assert tokenizer.token_bytes[: made.learned] == Tokenizer(tmp_path / "t").token_bytes[: made.learned]


def test_sentencepiece_gives_the_same_bytes_twice_and_its_tokens_are_built(workspace: Path, tmp_path: Path) -> None:
    places = (f"tokenizer.dir={tmp_path}/a", f"tokens.dir={tmp_path}/tokens")
    recipe = tiny_recipe(workspace, "tokenizer.trainer=sentencepiece-unigram", *places)
    for name in ("a", "b"):
        made = train_tokenizer(recipe.tokenizer, recipe.documents_dir, tmp_path / name)
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()
    corpus = read_documents_manifest(recipe.documents_dir)
    assert 0.9 * sum(part.bytes for part in corpus.splits["train"].values()) < made.trained_on_bytes
    assert train_tokenizer(recipe.tokenizer, recipe.documents_dir, tmp_path / "a").reused
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)


@pytest.mark.parametrize("name", ["think", "<>", "<a b>", "<a>b", "< a>", "<0x41>", "<\u200b>", "<" + "a" * 70 + ">"])
def test_names_that_text_could_be_are_mistakes(name: str) -> None:
    with pytest.raises(RecipeError, match="must be like <name>"):
        parse_recipe(json.dumps({"tokenizer": {"special_tokens": [name]}}))


def test_special_tokens_that_exist_or_do_not_fit_say_so(workspace: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="given twice"):
        parse_recipe("tokenizer: {special_tokens: ['<a>', '<a>']}")
    for name in ("<|pad|>", "<|reserved_3|>", "<unk>"):
        with pytest.raises(UsageError, match="every vocabulary has"):
            train_tokenizer(recipe_of("zero2all", [name]), workspace / "documents", tmp_path / "t")
    too_small = "sentencepiece cannot train this vocabulary: Vocabulary size"
    for trainer, count, said in (("zero2all", 400, "leaves no room"), ("sentencepiece-bpe", 360, too_small)):
        many = [f"<t{n}>" for n in range(count)]
        with pytest.raises(UsageError, match=said):
            train_tokenizer(recipe_of(trainer, many), workspace / "documents", tmp_path / "t")


def test_the_estimate_covers_the_published_memory_of_sentencepiece() -> None:
    text, peak = 20e9, 135e9  # bytes, published for a large English corpus; a byte of Chinese takes three times that
    estimate = sentencepiece_vocabulary.PROCESS_MEMORY + sentencepiece_vocabulary.MEMORY_PER_BYTE * text
    assert peak < estimate < 5 * peak


def test_the_package_gets_no_more_text_than_the_estimate_allows(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = read_documents_manifest(workspace / "documents")
    available = sum(source.bytes for source in corpus.splits["train"].values())
    rest = (1 << 30) - sentencepiece_vocabulary.MEMORY_PER_BYTE * (available // 2)
    monkeypatch.setattr(sentencepiece_vocabulary, "PROCESS_MEMORY", rest)  # half of the text fits
    recipe = TokenizerRecipe(trainer="sentencepiece-bpe", vocab_size=512, max_memory=1 << 30)
    learned = sentencepiece_vocabulary.train_sentencepiece(recipe, workspace / "documents", corpus, ("<|endoftext|>",))
    assert 0.2 * available < learned.trained_on_bytes < 0.8 * available
    assert "more would not fit into tokenizer.max_memory" in " ".join(capsys.readouterr().err.split())


# --- the vocabulary of the model, as z2a recipe check compares it


def test_a_preset_with_a_larger_vocabulary_than_the_tokenizer_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"out: {tmp_path}\nmodel: {{preset: z2all-1.1b}}\ntrain: {{steps: 1}}\n", encoding="utf-8")
    checked = CliRunner().invoke(app, ["recipe", "check", str(path)])
    assert checked.exit_code == 0, checked.output
    size = PRESETS["z2all-1.1b"]["vocab_size"]
    assert f"model.vocab_size is {size} (preset z2all-1.1b), but tokenizer.vocab_size is 8192" in checked.stdout
    [remark] = json.loads(CliRunner().invoke(app, ["recipe", "check", str(path), "--json"]).stdout)["remarks"]
    assert "56128 rows of the embedding and the head are never used" in remark
    equal = CliRunner().invoke(app, ["recipe", "check", str(path), f"tokenizer.vocab_size={size}"])
    assert "remark" not in equal.stdout


@pytest.mark.parametrize(
    ("size", "is_mistake", "is_remark"), [(448, True, False), (512, False, False), (576, False, True)]
)
def test_the_vocabulary_of_a_tokenizer_that_exists_counts(
    workspace: Path, size: int, is_mistake: bool, is_remark: bool
) -> None:
    recipe = parse_recipe(
        f"tokenizer: {{dir: {workspace}/tokenizer}}\nmodel: {{vocab_size: {size}}}\ntrain: {{steps: 1}}", []
    )
    found = [mistake.message for mistake in vocabulary_mistakes(recipe)]
    assert bool(found) == is_mistake
    assert (vocabulary_remark(recipe) is not None) == is_remark
    if is_mistake:
        assert found[0].startswith("model.vocab_size (448) is smaller than the vocabulary in ")
        assert "(512): set model.vocab_size=512, or null" in found[0]
