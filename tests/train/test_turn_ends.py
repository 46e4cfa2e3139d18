"""A tokenizer whose end-of-text token ends every message, as that of Llama 3 Instruct: answers still see questions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from tests.conftest import ENGLISH, tiny_recipe
from zero2all.corpus import build_corpus
from zero2all.evals import evaluate_bpb
from zero2all.model import ModelInputs, Z2all
from zero2all.parallel import ParallelModel
from zero2all.recipe import Recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokenizer.import_export import import_tokenizer
from zero2all.tokens import build_tokens
from zero2all.train import Run, train
from zero2all.train.blame import blame_step

BEGIN, TURN_END, HEADER_END = "<|begin_of_text|>", "<|eot_id|>", "<|end_header_id|>"
TEMPLATE = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
SEQ_LEN = 160
Captured = list[tuple[Tensor, Tensor | None]]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizer")
    (root / "hf").mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = HFTokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BEGIN, "<|end_of_text|>", "<|start_header_id|>", HEADER_END, TURN_END])
    backend.save(str(root / "hf" / "tokenizer.json"))
    config = {"bos_token": BEGIN, "eos_token": TURN_END, "chat_template": TEMPLATE}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (root / "hf" / "tokenizer_config.json").write_text(json.dumps(config))
    import_tokenizer(root / "hf", root / "imported")
    return root / "imported"


def write_records(root: Path) -> None:
    rng = random.Random(6)

    def text() -> str:
        return " ".join(rng.choices(ENGLISH.split(), k=2))

    chats = []
    for number in range(40):
        question = {"role": "user", "content": f"{number:02} {text()}"}
        chats.append({"messages": [question, {"role": "assistant", "content": text()}]})
    (root / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)))


def make_recipe(workspace: Path, root: Path, out: Path, tokenizer_dir: Path, *overrides: str) -> Recipe:
    sources = [{"name": "chat", "kind": "chat", "paths": [f"{root}/chat.jsonl"]}]
    return tiny_recipe(
        workspace, f"out={out}", f"corpus.sources={json.dumps(sources)}", f"corpus.dir={root}/documents",
        f"tokens.dir={root}/tokens", f"tokenizer.dir={tokenizer_dir}", "corpus.holdout=0.2", "train.steps=1",
        f"train.seq_len={SEQ_LEN}", f"model.max_position_embeddings={SEQ_LEN}", f"train.batch_tokens={4 * SEQ_LEN}",
        f"train.micro_batch_tokens={4 * SEQ_LEN}", *overrides,
    )  # fmt: skip


@pytest.fixture(scope="module")
def built(workspace: Path, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    root = tmp_path_factory.mktemp("turns")
    write_records(root)
    recipe = make_recipe(workspace, root, root, tokenizer_dir, "model.initializer_range=0.3")
    build_corpus(recipe.corpus, recipe.documents_dir)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    base = recipe.model_copy(update={"run": "base"})
    train(base)
    return recipe


# With a tokenizer like this, tests/oracle compares every objective with transformers. Here is what it leaves out:
# validation, blame and rows of one conversation.
OBJECTIVES: dict[str, list[str]] = {
    "pretraining with a mask": ["train.document_mask=true"],
    "sft": ["train.objective.name=sft"],
    "sft, one in a row": ["train.objective.name=sft", "train.objective.packing=false"],
}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Captured:
    """Tokens and document starts of every call of the model that reads packed rows."""
    found: Captured = []

    def capture(owner: Any, name: str, place: int) -> None:
        original = getattr(owner, name)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            tokens, starts = args[0], options.get("doc_starts_BS", args[place] if len(args) > place else None)
            if isinstance(tokens, ModelInputs):
                tokens, starts = tokens.tokens_BS, tokens.doc_starts_BS
            found.append((tokens.clone(), None if starts is None else starts.clone()))
            return original(self, *args, **options)

        monkeypatch.setattr(owner, name, call)

    capture(ParallelModel, "forward_backward", 1)
    capture(ParallelModel, "eval_losses", 2)
    return found


def spans_of(row: list[int], tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """The conversations of a row: the template writes one token before each and nowhere else."""
    begins = [place for place, token in enumerate(row) if token == tokenizer.special_ids[BEGIN]]
    return list(zip(begins, [*begins[1:], len(row)], strict=True))


def check_row(model: Z2all, row: Tensor, starts: Tensor, tokenizer: Tokenizer) -> int | None:
    """The last conversation of a row with an answer, after checking what the answer depends on."""
    spans, header = spans_of(row.tolist(), tokenizer), tokenizer.special_ids[HEADER_END]
    for number, (begin, end) in reversed(list(enumerate(spans))):
        headers = [place for place in range(begin, end) if row[place] == header]
        if len(headers) < 2:
            continue
        answer = slice(headers[1], min(end, headers[1] + 4))
        question, previous = row.clone(), row.clone()
        question[headers[0] + 4] = 7  # a letter
        if number:
            previous[spans[number - 1][0] + 5] = 7
            assert not torch.equal(previous, row)
        assert not torch.equal(question, row)
        with torch.inference_mode():
            logits, *others = (
                model(ModelInputs(one[None], doc_starts_BS=starts[None]))[0, answer]
                for one in (row, question, previous)
            )
        assert (logits - others[0]).abs().max() > 1e-3, "the answer does not depend on the question"
        assert torch.equal(logits, others[1]), "the answer depends on the conversation before"
        return number
    return None


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_answers_depend_on_their_question_and_on_no_other_document(
    objective: str, built: Recipe, workspace: Path, tmp_path: Path, captured: Captured
) -> None:
    base = Run.open(built.run_dir.parent / "base")
    options = [f"train.init={base.directory}", *OBJECTIVES[objective]]
    recipe = make_recipe(workspace, built.out, tmp_path, built.tokenizer_dir, *options)
    train(recipe)
    run, tokenizer = Run.open(recipe.run_dir), Tokenizer(recipe.tokenizer_dir)
    evaluate_bpb(run.load_model(), tokenizer, recipe)
    blame_step(run, 0)
    model, checked = base.load_model().eval(), []
    assert captured
    for tokens_BS, doc_starts_BS in captured:
        assert doc_starts_BS is not None
        for row, starts in zip(tokens_BS, doc_starts_BS, strict=True):
            checked.append(check_row(model, row, starts, tokenizer))
    places = {place for place in checked if place is not None}
    assert max(places) > 0 or "one in a row" in objective, "no conversation follows a different one"
