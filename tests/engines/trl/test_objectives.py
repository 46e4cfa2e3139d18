"""Losses and gradients of every objective equal those of TRL on the same batch, and PEFT reads our adapters."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="TRL is not installed: see requirements.txt")
os.environ["HF_HUB_OFFLINE"] = os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from tests.runs import train_run
from zero2all.export import export_adapter_of_run, export_run
from zero2all.model import IGNORE_INDEX, ModelInputs, Z2all, document_starts
from zero2all.model.hf_weights import hf_names
from zero2all.recipe.objective import DPORecipe, GRPORecipe, KTORecipe
from zero2all.train import Run
from zero2all.train.objectives.grpo import RolloutBatch, group_advantages, grpo_losses
from zero2all.train.objectives.preference import CompletionBatch, kto_losses, preference_losses

TOLERANCE = 1e-5
PAIRS = [  # prompt, chosen, rejected: ids of different lengths
    ([5, 6, 7], [8, 9, 10, 11], [12, 13]),
    ([20, 21], [22, 23], [24, 25, 26, 27, 28]),
    ([30, 31, 32, 33], [34, 35, 36], [37, 38, 39]),
]
REFERENCE = [(-20.0, -14.0), (-11.0, -33.0), (-19.0, -17.0)]
LOGGING: dict[str, Any] = {"report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}


@pytest.fixture(scope="module")
def run(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(workspace, tmp_path_factory.mktemp("base"), "train.steps=6")


@pytest.fixture(scope="module")
def exported(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "hf"
    export_run(run, out)
    return out


def theirs(exported: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    tokenizer.pad_token = "<|pad|>"
    return model, tokenizer


def assert_same(ours: Z2all, loss: Tensor, model: Any, their_loss: Tensor) -> None:
    """Values and gradients."""
    assert loss.item() == pytest.approx(their_loss.item(), abs=TOLERANCE)
    ours.zero_grad()
    loss.backward()
    model.zero_grad()
    their_loss.backward()
    their_gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    compared = 0
    for name, parameter in ours.named_parameters():
        [hf_name] = hf_names(name, ours.config)
        expected = their_gradients[hf_name]
        assert parameter.grad is not None
        assert expected is not None
        assert (parameter.grad[: len(expected)] - expected).abs().max() < TOLERANCE, name
        compared += 1
    assert compared > 10


def packed_rows(
    sequences: list[tuple[list[int], list[int]]], end_of_text: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prompts and answers in one row: inputs, targets, the answer that each target is of, and first tokens."""
    tokens, segments, first = [], [], []
    for number, (prompt, answer) in enumerate(sequences, 1):
        tokens += [*prompt, *answer, end_of_text]
        segments += [0] * len(prompt) + [number] * len(answer) + [0]
        first += [True] + [False] * (len(tokens) - len(first) - 1)
    inputs, targets = torch.tensor([tokens[:-1]]), torch.tensor([tokens[1:]])
    segments_BS = torch.tensor([segments[1:]])
    targets[segments_BS == 0] = IGNORE_INDEX
    return inputs, targets, segments_BS, torch.tensor([first[:-1]])


def our_losses(model: Z2all, sequences: list[tuple[list[int], list[int]]], end_of_text: int) -> tuple[Tensor, Tensor]:
    inputs, targets, segments_BS, is_first_BS = packed_rows(sequences, end_of_text)
    losses: Tensor = model(ModelInputs(inputs, targets_BS=targets, doc_starts_BS=document_starts(is_first_BS)))
    return losses, segments_BS


def answers_of(
    sequences: list[tuple[list[int], list[int]]], segments_BS: Tensor, desirable: list[bool], reference: list[float]
) -> CompletionBatch:
    lengths = torch.tensor([[float(len(answer)) for _, answer in sequences]])
    return CompletionBatch(segments_BS, lengths, torch.tensor([desirable]), torch.tensor([reference]))


@pytest.fixture
def ours(run: Run) -> Z2all:
    return run.load_model().train()


def test_sft(run: Run, exported: Path, ours: Z2all, tmp_path: Path) -> None:
    model, tokenizer = theirs(exported)
    messages = [
        [{"role": "user", "content": "the model"}, {"role": "assistant", "content": "reads a line"}],
        [{"role": "system", "content": "text"}, {"role": "user", "content": "春眠"},
         {"role": "assistant", "content": "不觉晓"}, {"role": "user", "content": "and"},
         {"role": "assistant", "content": "long roads"}],
    ]  # fmt: skip
    config = SFTConfig(
        output_dir=str(tmp_path), assistant_only_loss=True, per_device_train_batch_size=2, max_length=None, **LOGGING
    )
    trainer = SFTTrainer(model, args=config, train_dataset=Dataset.from_list([{"messages": one} for one in messages]),
                         processing_class=tokenizer)  # fmt: skip
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(2)])
    their_loss = trainer.compute_loss(model, dict(batch))
    own = run.tokenizer()
    total, count = torch.zeros(()), 0
    for one in messages:
        chat = own.encode_chats(own.reference, [own.split_chat(one)])[0]
        ids, mask = torch.tensor(chat.ids.astype("int64"))[None], torch.tensor(chat.generated)[None]
        targets = ids[:, 1:].masked_fill(~mask[:, 1:], IGNORE_INDEX)
        total = total + ours(ids[:, :-1], targets_BS=targets).sum()
        count += int(mask.sum())
    assert_same(ours, total / count, model, their_loss)


def dpo_batch(pairs: list[tuple[list[int], list[int], list[int]]], pad: int) -> dict[str, Tensor]:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    examples = [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r in pairs]
    batch: dict[str, Tensor] = DataCollatorForPreference(pad_token_id=pad)(examples)
    batch["ref_chosen_logps"] = torch.tensor([one for one, _ in REFERENCE])
    batch["ref_rejected_logps"] = torch.tensor([other for _, other in REFERENCE])
    return batch


TEXT_PAIRS = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("sigmoid", {}),
        ("ipo", {}),
        ("hinge", {}),
        ("robust", {"label_smoothing": 0.1}),
        ("sigmoid", {"sft_weight": 0.5}),
    ],
    ids=["sigmoid", "ipo", "hinge", "robust", "sigmoid and SFT"],
)
def test_dpo(exported: Path, ours: Z2all, loss: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, tokenizer = theirs(exported)
    weight = options.get("sft_weight")
    kinds: dict[str, Any] = (
        {"loss_type": [loss, "sft"], "loss_weights": [1.0, weight]} if weight else {"loss_type": [loss]}
    )
    config = DPOConfig(
        output_dir=str(tmp_path), beta=0.3, precompute_ref_log_probs=True, per_device_train_batch_size=3,
        label_smoothing=options.get("label_smoothing", 0.0), **kinds, **LOGGING,
    )  # fmt: skip
    trainer = DPOTrainer(model, args=config, train_dataset=Dataset.from_list(TEXT_PAIRS), processing_class=tokenizer)
    model.train()
    their_loss = trainer.compute_loss(model, dpo_batch(PAIRS, tokenizer.pad_token_id))
    sequences = [(prompt, answer) for prompt, *both in PAIRS for answer in both]
    losses, segments = our_losses(ours, sequences, tokenizer.eos_token_id)
    answers = answers_of(sequences, segments, [True, False] * 3, [value for pair in REFERENCE for value in pair])
    recipe = DPORecipe.model_validate({"loss": loss, "beta": 0.3, **options})
    logps = answers.logps(losses)
    value = preference_losses(logps, answers, recipe).sum() / 3
    chosen = sum(len(one) for _, one, _ in PAIRS)
    value = value - recipe.nll_weight * logps[:, ::2].sum() / chosen
    assert_same(ours, value, model, their_loss)


def test_simpo(exported: Path, ours: Z2all, tmp_path: Path) -> None:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    model, tokenizer = theirs(exported)
    config = CPOConfig(
        output_dir=str(tmp_path), loss_type="simpo", beta=2.0, simpo_gamma=0.5, cpo_alpha=0.0, max_length=64, **LOGGING
    )
    trainer = CPOTrainer(model, args=config, train_dataset=Dataset.from_list(TEXT_PAIRS), processing_class=tokenizer)
    their_loss, _ = trainer.get_batch_loss_metrics(model, cpo_batch(tokenizer.pad_token_id))
    sequences = [(prompt, answer) for prompt, *both in PAIRS for answer in both]
    losses, segments = our_losses(ours, sequences, tokenizer.eos_token_id)
    answers = answers_of(sequences, segments, [True, False] * 3, [0.0] * 6)
    recipe = DPORecipe(loss="simpo", beta=2.0, margin=0.5)
    assert_same(ours, preference_losses(answers.logps(losses), answers, recipe).sum() / 3, model, their_loss)


def test_orpo(exported: Path, ours: Z2all, tmp_path: Path) -> None:
    """TRL's negative log-likelihood is that of prompt and answer; ours of the answer, as in the paper's code for chats.
    So the odds ratio alone is compared."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    model, tokenizer = theirs(exported)
    config = ORPOConfig(output_dir=str(tmp_path), beta=0.3, max_length=64, **LOGGING)
    trainer = ORPOTrainer(model, args=config, train_dataset=Dataset.from_list(TEXT_PAIRS), processing_class=tokenizer)
    chosen, rejected, *_ = trainer.concatenated_forward(model, cpo_batch(tokenizer.pad_token_id))
    their_loss = -trainer.odds_ratio_loss(chosen, rejected)[0].mean()
    sequences = [(prompt, answer) for prompt, *both in PAIRS for answer in both]
    losses, segments = our_losses(ours, sequences, tokenizer.eos_token_id)
    answers = answers_of(sequences, segments, [True, False] * 3, [0.0] * 6)
    recipe = DPORecipe(loss="orpo", beta=0.3)
    assert_same(ours, preference_losses(answers.logps(losses), answers, recipe).sum() / 3, model, their_loss)


def cpo_batch(pad: int) -> dict[str, Tensor]:
    """What the collator of the older trainers makes: padded on the right, the prompt masked in the labels."""
    batch: dict[str, Tensor] = {}
    for name, place in (("chosen", 1), ("rejected", 2)):
        width = max(len(one[0]) + len(one[place]) for one in PAIRS)
        ids, labels, mask = (torch.full((3, width), value) for value in (pad, -100, 0))
        for row, one in enumerate(PAIRS):
            prompt, answer = one[0], one[place]
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor([*prompt, *answer])
            labels[row, len(prompt) : end] = torch.tensor(answer)
            mask[row, :end] = 1
        batch |= {f"{name}_input_ids": ids, f"{name}_labels": labels, f"{name}_attention_mask": mask}
    return batch


def test_kto(exported: Path, ours: Z2all, tmp_path: Path) -> None:
    model, tokenizer = theirs(exported)
    config = KTOConfig(
        output_dir=str(tmp_path), beta=0.2, desirable_weight=1.5, undesirable_weight=0.5, precompute_ref_log_probs=True,
        per_device_train_batch_size=2, **LOGGING,
    )  # fmt: skip
    data = [{"prompt": f"a{n}", "completion": f"b{n}", "label": n % 2 == 0} for n in range(4)]
    trainer = KTOTrainer(model, args=config, train_dataset=Dataset.from_list(data), processing_class=tokenizer)
    labels = [True, False, True]
    sequences = [(prompt, chosen) for prompt, chosen, _ in PAIRS]
    reference = [one for one, _ in REFERENCE]
    divergence = 0.7
    width = max(len(prompt) + len(answer) for prompt, answer in sequences)
    ids, mask = torch.full((3, width), tokenizer.pad_token_id), torch.zeros(3, width, dtype=torch.int64)
    attention = torch.zeros(3, width, dtype=torch.int64)
    for row, (prompt, answer) in enumerate(sequences):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor([*prompt, *answer])
        mask[row, len(prompt) : end] = 1
        attention[row, :end] = 1
    trainer._compute_kl_logps = lambda model, batch: torch.full((3,), divergence)  # its own pairing is by batches
    batch = {
        "input_ids": ids, "attention_mask": attention, "completion_mask": mask, "label": torch.tensor(labels),
        "ref_logps": torch.tensor(reference), "ref_KL_logps": torch.zeros(3),
    }  # fmt: skip
    model.train()
    their_loss = trainer.compute_loss(model, batch)
    losses, segments = our_losses(ours, sequences, tokenizer.eos_token_id)
    answers = answers_of(sequences, segments, labels, reference)
    recipe = KTORecipe(beta=0.2, desirable_weight=1.5, undesirable_weight=0.5)
    assert_same(ours, kto_losses(answers.logps(losses), answers, divergence, recipe).sum() / 3, model, their_loss)


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
def test_grpo(exported: Path, ours: Z2all, loss: str, tmp_path: Path) -> None:
    model, tokenizer = theirs(exported)
    config = GRPOConfig(
        output_dir=str(tmp_path), loss_type=loss, beta=0.0, num_generations=3,
        per_device_train_batch_size=3, max_completion_length=8, gradient_accumulation_steps=1, **LOGGING,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 3), processing_class=tokenizer,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    sequences = [(prompt, chosen) for prompt, chosen, _ in PAIRS]
    rewards = torch.tensor([[1.0, 0.0, 0.4]])
    options = GRPORecipe(rewards=["a:b"], loss=loss)  # type: ignore[arg-type]
    advantages = group_advantages(rewards, options)[0]
    longest_prompt, longest = max(len(p) for p, _ in sequences), max(len(a) for _, a in sequences)
    prompts, answers = (torch.full((3, width), tokenizer.pad_token_id) for width in (longest_prompt, longest))
    prompt_mask, answer_mask = torch.zeros(3, longest_prompt).long(), torch.zeros(3, longest).long()
    for row, (prompt, answer) in enumerate(sequences):
        prompts[row, longest_prompt - len(prompt) :] = torch.tensor(prompt)
        prompt_mask[row, longest_prompt - len(prompt) :] = 1
        answers[row, : len(answer)] = torch.tensor(answer)
        answer_mask[row, : len(answer)] = 1
    batch = {
        "prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": answers, "completion_mask": answer_mask,
        "advantages": advantages, "num_items_in_batch": answer_mask.sum(),
    }  # fmt: skip
    model.train()
    their_loss = trainer._compute_loss(model, batch)
    losses, segments = our_losses(ours, sequences, tokenizer.eos_token_id)
    mask = (segments > 0).float()
    lengths = torch.tensor([0.0, *(len(answer) for _, answer in sequences)])
    weights = {"dapo": mask, "grpo": mask / lengths[segments].clamp(min=1), "dr_grpo": mask / 8}[loss]
    advantages_BS = torch.cat([torch.zeros(1), advantages])[segments]
    rollouts = RolloutBatch(mask, advantages_BS, -losses.detach(), weights)
    value = grpo_losses(-losses, rollouts, options).sum() / (mask.sum() if loss == "dapo" else 3)
    assert_same(ours, value, model, their_loss)


def test_the_chat_template_passes_the_checks_of_trl(exported: Path) -> None:
    from trl import chat_template_utils

    _, tokenizer = theirs(exported)
    assert chat_template_utils.is_chat_template_prefix_preserving(tokenizer)
    assert "generation" in tokenizer.chat_template


@pytest.mark.parametrize("bf16", [False, True])
def test_peft_computes_our_logits_with_our_adapter(
    run: Run, exported: Path, workspace: Path, bf16: bool, tmp_path: Path
) -> None:
    from peft import PeftModel

    options = [f"train.init={run.directory}", "model.lora={rank: 4}", "train.steps=8"]
    tuned = train_run(workspace, tmp_path / "lora", *options)
    export_adapter_of_run(tuned, tmp_path / "adapter")
    base, _ = theirs(exported)
    tokens = torch.arange(3, 35)[None]
    with torch.inference_mode():
        expected = tuned.load_model()(tokens)
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        assert (adapted(tokens).logits[..., : expected.shape[-1]] - expected).abs().max() < 1e-4
        export_run(tuned, tmp_path / "merged", dtype="bf16" if bf16 else "f32")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
        difference = (merged(tokens).logits[..., : expected.shape[-1]] - expected).abs().max()
        # In bf16 no more than rounding the merged weights costs.
        theirs_merged = adapted.merge_and_unload().to(torch.bfloat16 if bf16 else torch.float32).float()
        of_peft = (theirs_merged(tokens).logits[..., : expected.shape[-1]] - expected).abs().max()
        assert difference < (1e-4 if not bf16 else 1.5 * of_peft + 1e-4)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4
