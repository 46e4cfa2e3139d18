"""A step of SFT, DPO and KTO equals TRL's with every chat template: from messages to loss and gradients.

TRL tokenizes and masks by itself and has no packing here. Its model has the weights that the product's step had.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="TRL is not installed: see requirements.txt")
os.environ["HF_HUB_OFFLINE"] = os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from tests.oracle.product import ObservedStep, observe
from tests.oracle.reference import Models, Reference, TokenSequence, TransformersTokenizer, whole_conversations
from tests.oracle.table import GRADIENT_TOLERANCE, LAYOUTS, LOSS_TOLERANCE, OBJECTIVES, Cell, gradient_difference
from tests.oracle.templates import TEMPLATES, Template
from tests.oracle.workspace import Workspace, answer

LOGGING: dict[str, Any] = {"report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, "max_length": None}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("oracle") / "workspace")


@pytest.fixture(params=TEMPLATES, ids=lambda template: template.name)
def template(request: pytest.FixtureRequest, workspace: Workspace) -> Template:
    workspace.add(request.param)
    return request.param  # type: ignore[no-any-return]


def observed(workspace: Workspace, template: Template, objective: str, out: Path) -> Reference:
    """The step of the product, and the sequences of its rows."""
    cell = Cell(template, LAYOUTS[0], next(one for one in OBJECTIVES if one.name == objective))
    step, models = observe(cell.recipe(workspace, out)), Models(workspace)
    models.trained.load(step.weights)
    placed = whole_conversations(step, TransformersTokenizer(workspace, template.name))
    return Reference(placed, step, models.trained, models.initial, models.teacher)


def load_tokenizer(workspace: Workspace, template: Template) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(workspace.original(template.name))
    tokenizer.pad_token = tokenizer.pad_token or "<|unused_639|>"
    return tokenizer


def assert_same(step: ObservedStep, given: Reference, their_loss: Tensor) -> None:
    their_loss.backward()  # type: ignore[no-untyped-call]
    assert step.loss == pytest.approx(their_loss.item(), abs=LOSS_TOLERANCE)
    assert gradient_difference(step, given.model) < GRADIENT_TOLERANCE


def up_to_turn_end(ids: list[int], template: Template, tokenizer: Any) -> list[int]:
    """TRL also scores the newline that some templates write after the end of a turn."""
    end = tokenizer.convert_tokens_to_ids(template.eos)
    return ids[: len(ids) - ids[::-1].index(end)]


def initial_logps(given: Reference, sequences: list[TokenSequence]) -> Tensor:
    with torch.no_grad():
        return torch.stack([given.initial.logps(one).sum() for one in sequences]).float()


def test_sft(workspace: Workspace, template: Template, tmp_path: Path) -> None:
    given, tokenizer = observed(workspace, template, "SFT", tmp_path), load_tokenizer(workspace, template)
    records = [{"messages": workspace.records.chats[one.example[1]]} for one in given.sequences]
    config = SFTConfig(output_dir=str(tmp_path), assistant_only_loss=True, **LOGGING)
    model = given.model.model.train()
    trainer = SFTTrainer(model, args=config, train_dataset=Dataset.from_list(records), processing_class=tokenizer)
    batch = trainer.data_collator([trainer.train_dataset[number] for number in range(len(records))])
    assert_same(given.step, given, trainer.compute_loss(model, dict(batch)))


def test_dpo(workspace: Workspace, template: Template, tmp_path: Path) -> None:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    given, tokenizer = observed(workspace, template, "DPO", tmp_path), load_tokenizer(workspace, template)
    pairs, records = given.pairs(), []
    for one, _ in pairs:
        prompt, chosen, rejected = workspace.records.pairs[one.example[1]]
        records.append({"prompt": prompt, "chosen": [answer(chosen)], "rejected": [answer(rejected)]})
    config = DPOConfig(output_dir=str(tmp_path), beta=0.1, precompute_ref_log_probs=True, **LOGGING)
    model = given.model.model.train()
    trainer = DPOTrainer(model, args=config, train_dataset=Dataset.from_list(records), processing_class=tokenizer)
    examples = [
        {
            "prompt_ids": example["prompt_ids"],
            **{side: up_to_turn_end(example[side], template, tokenizer) for side in ("chosen_ids", "rejected_ids")},
        }
        for example in trainer.train_dataset
    ]
    batch = DataCollatorForPreference(pad_token_id=tokenizer.pad_token_id)(examples)
    batch["ref_chosen_logps"] = initial_logps(given, [chosen for chosen, _ in pairs])
    batch["ref_rejected_logps"] = initial_logps(given, [rejected for _, rejected in pairs])
    assert_same(given.step, given, trainer.compute_loss(model, batch))


def test_kto(workspace: Workspace, template: Template, tmp_path: Path) -> None:
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    given, tokenizer = observed(workspace, template, "KTO", tmp_path), load_tokenizer(workspace, template)
    records = []
    for one in given.sequences:
        kind, number = one.example
        if kind == "rating":
            prompt, text, _ = workspace.records.ratings[number]
        else:
            prompt, chosen, rejected = workspace.records.pairs[number]
            text = chosen if one.desirable else rejected
        records.append({"prompt": prompt, "completion": [answer(text)], "label": one.desirable})
    config = KTOConfig(
        output_dir=str(tmp_path), beta=0.1, desirable_weight=1.5, undesirable_weight=0.5, precompute_ref_log_probs=True,
        per_device_train_batch_size=len(records), **LOGGING,
    )  # fmt: skip
    model = given.model.model.train()
    trainer = KTOTrainer(model, args=config, train_dataset=Dataset.from_list(records), processing_class=tokenizer)
    examples = [
        {
            "prompt_ids": example["prompt_ids"], "label": example["label"],
            "completion_ids": up_to_turn_end(example["completion_ids"], template, tokenizer),
        }
        for example in trainer.train_dataset
    ]  # fmt: skip
    batch = DataCollatorForUnpairedPreference(pad_token_id=tokenizer.pad_token_id)(examples)
    batch["ref_logps"] = initial_logps(given, given.sequences)
    batch["ref_KL_logps"] = torch.zeros(len(records))
    divergence = given.step.metrics["kl"]  # both combine prompts and answers in their own way
    trainer._compute_kl_logps = lambda model, batch: torch.full((len(records),), divergence)
    assert_same(given.step, given, trainer.compute_loss(model, batch))
