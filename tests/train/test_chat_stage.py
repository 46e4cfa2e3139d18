"""Conversations in the mixture of a stage: from raw files to the batches of the trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import torch

from tests.conftest import tiny_recipe
from tests.corpus.test_chat_source import many
from zero2all.base.conversation import Conversation
from zero2all.corpus import build_corpus
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import build_tokens
from zero2all.train import Run, TrainerHooks, trace_step, train
from zero2all.train.blame import blame_step

STAGES = "[{name: main, steps: 3, mixture: {en: 1}}, {name: anneal, steps: 4, mixture: {en: 1, chat: 3}}]"


def test_an_anneal_stage_trains_on_rendered_conversations(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps(record) for record in many(150)))
    sources = [
        {"name": "en", "paths": [f"{workspace}/raw/en.jsonl"]},
        {"name": "chat", "kind": "chat", "paths": [f"{tmp_path}/chat.jsonl"]},
    ]
    recipe = tiny_recipe(
        workspace, f"out={tmp_path}", f"corpus.sources={json.dumps(sources)}", "train.steps=null",
        f"train.stages={STAGES}", "corpus.dir=null", "tokens.dir=null", "evals.every=7 steps",
    )  # fmt: skip
    build_corpus(recipe.corpus, recipe.documents_dir)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    batches: dict[int, torch.Tensor] = {}
    train(
        recipe,
        hooks=TrainerHooks(
            on_batch=lambda batch: batches.update({batch.step: torch.cat([batch.inputs, batch.targets[:, -1:]], 1)})
        ),
    )
    run, tokenizer = Run.open(tmp_path), Tokenizer(recipe.tokenizer_dir)
    rendered = {
        row["gid"]: tokenizer.render_chat(**Conversation.from_json(json.loads(row["others"])).to_json())
        for path in (tmp_path / "documents" / "train").glob("chat*.parquet")
        for row in pq.read_table(path).to_pylist()
    }
    start = tokenizer.special_ids["<|im_start|>"]
    assert not any((batches[step] == start).any() for step in range(3))
    whole = 0
    for step in range(3, 7):
        traced = trace_step(run, step)
        for row, sample in enumerate(range(*traced["samples"])):
            offset = 0
            for span in (span for span in traced["documents"] if span["sample"] == sample):
                seen = batches[step][row, offset : offset + span["tokens"]].tolist()
                if span["source"] == "chat":
                    ids = [*rendered[span["gid"]], tokenizer.eos_token_id]
                    assert seen == ids[span["first_token"] : span["first_token"] + span["tokens"]]
                    whole += len(seen) > 20
                offset += span["tokens"]
    assert whole > 10
    shares = [span["source"] for step in range(3, 7) for span in trace_step(run, step)["documents"]]
    assert shares.count("chat") > shares.count("en") > 0
    blamed = [span for span in blame_step(run, 5)["documents"] if span["source"] == "chat"]
    assert any("<|im_start|>user\nWhat is" in span["text"] for span in blamed)
