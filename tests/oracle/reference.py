"""The same step by transformers: every conversation alone, without packing, masks or ranks, and published losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracle.product import ObservedStep, Weights
from tests.oracle.workspace import Messages, Workspace, answer
from zero2all.tokenizer.vocabulary import END_OF_TEXT

Ids = tuple[int, ...]


class OracleError(AssertionError):
    """The rows of the product are not made of the conversations that transformers renders."""


@dataclass(frozen=True)
class TokenSequence:
    """A conversation, an answer or a text alone."""

    ids: Ids
    targets: tuple[bool, ...]
    """Of the same length: which ids are predicted."""
    example: tuple[str, int] = ("", 0)
    """Kind and number of the record."""
    desirable: bool = True

    @property
    def last_answer(self) -> TokenSequence:
        """Only the last run of targets counts."""
        end = len(self.targets) - self.targets[::-1].index(True)
        begin = end
        while begin and self.targets[begin - 1]:
            begin -= 1
        return replace(self, targets=tuple(begin <= place < end for place in range(len(self.ids))))

    @property
    def prompt(self) -> Ids:
        """Up to the last answer."""
        return self.ids[: self.last_answer.targets.index(True)]


@dataclass(frozen=True)
class Placed:
    """A sequence in a row of the product."""

    sequence: TokenSequence
    row: int
    first: int
    """The place of its first id."""

    def losses(self, losses: Tensor) -> Tensor:
        """Of its targets."""
        own = losses[self.row, self.first : self.first + len(self.sequence.ids)]
        return own[torch.tensor(self.sequence.targets)]


class TransformersTokenizer:
    """The tokenizer by transformers, from the directory that the product imported."""

    def __init__(self, workspace: Workspace, template: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(workspace.original(template))
        self._workspace = workspace
        vocab = self._tokenizer.get_vocab()
        self.document_end: int = vocab.get(END_OF_TEXT, self._tokenizer.eos_token_id)
        """What the product writes after every document, by its documentation."""
        self.turn_end: int = self._tokenizer.eos_token_id

    def chat(self, messages: Messages, example: tuple[str, int], desirable: bool = True) -> TokenSequence:
        found = self._tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return TokenSequence(tuple(found["input_ids"]), tuple(map(bool, found["assistant_masks"])), example, desirable)

    def text(self, text: str) -> Ids:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def documents(self) -> list[TokenSequence]:
        """Everything that the product may put into a row, before it is cut."""
        records, found = self._workspace.records, []
        for number, text in enumerate(records.texts):
            ids = self.text(text)
            found.append(TokenSequence(ids, (True,) * len(ids), ("text", number)))
        found += [self.chat(messages, ("chat", number)) for number, messages in enumerate(records.chats)]
        for number, (prompt, chosen, rejected) in enumerate(records.pairs):
            for text, desirable in ((chosen, True), (rejected, False)):
                found.append(self.chat([*prompt, answer(text)], ("preference", number), desirable).last_answer)
        for number, (prompt, text, label) in enumerate(records.ratings):
            found.append(self.chat([*prompt, answer(text)], ("rating", number), label).last_answer)
        return found

    def of_kind(self, kind: str) -> list[TokenSequence]:
        return [one for one in self.documents if one.example[0] == kind]


# How rows are read: every token of the product's rows must belong to a sequence that transformers rendered.


def whole_conversations(step: ObservedStep, tokenizer: TransformersTokenizer) -> list[Placed]:
    """Rows of conversations, each followed by the token that ends documents."""
    return _read_rows(step, tokenizer, lambda ids, targets: _longest_match(ids, tokenizer.documents))


def sampled_answers(step: ObservedStep, tokenizer: TransformersTokenizer) -> list[Placed]:
    """Rows of known prompts, each with an answer that was sampled: the targets after it."""
    prompts = [TokenSequence(one.prompt, (False,) * len(one.prompt), one.example) for one in tokenizer.of_kind("chat")]

    def match(ids: list[int], targets: list[bool]) -> TokenSequence | None:
        # A prompt may continue another one: what follows the right one is a target.
        fitting = [one for one in prompts if tuple(ids[: len(one.ids)]) == one.ids and targets[len(one.ids)]]
        if not fitting:
            return None
        [prompt] = fitting
        length = next(n for n, target in enumerate([*targets[len(prompt.ids) :], False]) if not target)
        end = len(prompt.ids) + length
        return TokenSequence(tuple(ids[:end]), prompt.targets + (True,) * length, prompt.example)

    return _read_rows(step, tokenizer, match)


Match = Callable[[list[int], list[bool]], TokenSequence | None]


def _read_rows(step: ObservedStep, tokenizer: TransformersTokenizer, match: Match) -> list[Placed]:
    end, placed = tokenizer.document_end, []
    for row, targets in _real_rows(step):
        ids, first = step.tokens[row].tolist(), 0
        while targets[first:].any():
            found = match(ids[first:], targets[first:].tolist())
            if found is None:
                raise OracleError(f"row {row} at {first} has no sequence of transformers: {ids[first : first + 40]}")
            after = first + len(found.ids)
            if targets[first:after].tolist() != list(found.targets):
                raise OracleError(f"row {row} at {first} has other targets than transformers")
            if after < len(ids) - 1 and ids[after] != end:  # the last place is a target only
                raise OracleError(f"row {row} has no end of a document at {after}")
            placed.append(Placed(found, row, first))
            first = after + 1
        if set(ids[first:-1]) - {end}:
            raise OracleError(f"row {row} has tokens after its last sequence")
    return placed


def _real_rows(step: ObservedStep) -> Iterator[tuple[int, Tensor]]:
    """Without those that pad a micro-batch."""
    return ((row, targets) for row, targets in enumerate(step.is_target) if targets.any())


def _longest_match(ids: list[int], known: Sequence[TokenSequence]) -> TokenSequence | None:
    fitting = [one for one in known if tuple(ids[: len(one.ids)]) == one.ids]
    return max(fitting, key=lambda one: len(one.ids), default=None)


def cut_documents(step: ObservedStep, tokenizer: TransformersTokenizer) -> list[Placed]:
    """Rows of text that is cut anywhere: a document is predicted from the token before it, which ended the last one."""
    documents = [(*one.ids, tokenizer.document_end) for one in tokenizer.of_kind("text") + tokenizer.of_kind("chat")]
    placed = []
    for row, _ in _real_rows(step):
        ids, first = tuple(step.tokens[row].tolist()), 0
        for length in _pieces(ids, documents):
            before = first - 1 if first else 0
            own = ids[before : first + length]
            if len(own) > 1:
                placed.append(Placed(TokenSequence(own, (False,) + (True,) * (len(own) - 1)), row, before))
            first += length
    return placed


def _pieces(ids: Ids, documents: Sequence[Ids]) -> list[int]:
    """Lengths of the parts of documents in a row: the end of one, whole ones, the beginning of one."""
    for document in documents:
        for begin in range(len(document)):
            part = document[begin : begin + len(ids)]
            if ids[: len(part)] == part and (rest := _whole_pieces(ids[len(part) :], documents)) is not None:
                return [len(part), *rest]
    raise OracleError(f"a row is not made of documents by transformers: {ids[:40]}")


def _whole_pieces(ids: Ids, documents: Sequence[Ids]) -> list[int] | None:
    if not ids:
        return []
    for document in documents:
        part = document[: len(ids)]
        if ids[: len(part)] == part and (rest := _whole_pieces(ids[len(part) :], documents)) is not None:
            return [len(part), *rest]
    return None


# Numbers


class TransformersModel:
    """A model by transformers, on one sequence at a time."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._logits: dict[Ids, Tensor] = {}

    def load(self, weights: Weights) -> None:
        """The weights of a step of the product."""
        values = {hf_name(name): weight for name, weight in weights.items()}
        self.model.load_state_dict({name: values[name][: len(old)] for name, old in self.model.state_dict().items()})
        self.model.zero_grad()
        self._logits.clear()

    def logits(self, ids: Ids) -> Tensor:
        """At each position but the last."""
        if ids not in self._logits:
            self._logits[ids] = self.model(torch.tensor([ids[:-1]])).logits[0]
        return self._logits[ids]

    def logps(self, sequence: TokenSequence) -> Tensor:
        """Of its targets."""
        logs = torch.log_softmax(self.logits(sequence.ids).double(), dim=-1)
        picked = logs.gather(1, torch.tensor(sequence.ids[1:])[:, None])[:, 0]
        return picked[torch.tensor(sequence.targets[1:])]


def hf_name(name: str) -> str:
    return name if name.startswith("lm_head") else f"model.{name}"


class Models:
    """The models of a step by transformers, read once."""

    def __init__(self, workspace: Workspace) -> None:
        self.trained = TransformersModel(workspace.model)
        self.initial = TransformersModel(workspace.model)
        self.teacher = TransformersModel(workspace.teacher)


@dataclass(frozen=True)
class Reference:
    """What a loss is computed from."""

    placed: list[Placed]
    step: ObservedStep
    model: TransformersModel
    """With the weights of the step."""
    initial: TransformersModel
    teacher: TransformersModel

    def logp(self, sequence: TokenSequence) -> Tensor:
        return self.model.logps(sequence).sum()

    def ratio(self, sequence: TokenSequence) -> Tensor:
        """To the initial model, as logarithm."""
        with torch.no_grad():
            initial = self.initial.logps(sequence).sum()
        return self.logp(sequence) - initial

    @property
    def sequences(self) -> list[TokenSequence]:
        return [one.sequence for one in self.placed]

    def pairs(self) -> list[tuple[TokenSequence, TokenSequence]]:
        """Chosen and rejected."""
        both = list(zip(self.sequences[::2], self.sequences[1::2], strict=True))
        if any(one.example != other.example or not one.desirable or other.desirable for one, other in both):
            raise OracleError("a row does not hold the chosen and the rejected answer of each pair in turn")
        return both

    def margins(self) -> Tensor:
        """How much more the model prefers the chosen answer of each pair than the initial model does."""
        return torch.stack([self.ratio(chosen) - self.ratio(rejected) for chosen, rejected in self.pairs()])


def token_loss(given: Reference) -> Tensor:
    """Pretraining and SFT: the mean over targets."""
    logps = torch.cat([given.model.logps(one) for one in given.sequences])
    return -logps.mean()


def dpo_loss(given: Reference, beta: float = 0.1) -> Tensor:
    return -F.logsigmoid(beta * given.margins()).mean()


def ipo_loss(given: Reference, beta: float = 0.1) -> Tensor:
    losses = []
    for chosen, rejected in given.pairs():
        margin = given.ratio(chosen) / sum(chosen.targets) - given.ratio(rejected) / sum(rejected.targets)
        losses.append((margin - 1 / (2 * beta)) ** 2)
    return torch.stack(losses).mean()


def hinge_loss(given: Reference, beta: float = 0.1) -> Tensor:
    return F.relu(1 - beta * given.margins()).mean()


def robust_loss(given: Reference, beta: float = 0.1, wrong: float = 0.1) -> Tensor:
    margins = beta * given.margins()
    return ((-(1 - wrong) * F.logsigmoid(margins) + wrong * F.logsigmoid(-margins)) / (1 - 2 * wrong)).mean()


def simpo_loss(given: Reference, beta: float = 2.0, gamma: float = 0.5) -> Tensor:
    losses = []
    for chosen, rejected in given.pairs():
        means = [given.logp(one) / sum(one.targets) for one in (chosen, rejected)]
        losses.append(-F.logsigmoid(beta * (means[0] - means[1]) - gamma))
    return torch.stack(losses).mean()


def orpo_loss(given: Reference, beta: float = 0.1) -> Tensor:
    losses, chosen_logps = [], []
    for chosen, rejected in given.pairs():
        means = [given.logp(one) / sum(one.targets) for one in (chosen, rejected)]
        odds = [mean - torch.log1p(-torch.exp(mean)) for mean in means]
        losses.append(-beta * F.logsigmoid(odds[0] - odds[1]))
        chosen_logps.append(given.model.logps(chosen))
    return torch.stack(losses).mean() - torch.cat(chosen_logps).mean()


def kto_loss(given: Reference, beta: float = 0.1, desirable: float = 1.5, undesirable: float = 0.5) -> Tensor:
    """With the divergence that the product estimated: which prompts and answers it combines is its choice."""
    divergence, losses = given.step.metrics["kl"], []
    for one in given.sequences:
        gain = given.ratio(one) - divergence
        weight, sign = (desirable, 1) if one.desirable else (undesirable, -1)
        losses.append(weight * (1 - torch.sigmoid(sign * beta * gain)))
    return torch.stack(losses).mean()


def grpo_loss(given: Reference) -> Tensor:
    """DAPO's mean over tokens, with truncated importance weights; before an update the ratio of the policy is 1."""
    from tests.oracle.rollouts import reward, sampler_logps

    losses = []
    by_prompt = sorted(given.sequences, key=lambda one: one.example)
    for _, group in groupby(by_prompt, key=lambda one: one.example):
        answers = list(group)
        rewards = torch.tensor([reward(one.ids[len(one.prompt) :]) for one in answers])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for one, advantage in zip(answers, advantages.tolist(), strict=True):
            logps = given.model.logps(one)
            sampler = torch.tensor(sampler_logps(one.ids[len(one.prompt) :]))
            weight = torch.exp(logps.detach() - sampler).clamp(max=2.0)
            losses.append(-advantage * weight * torch.exp(logps - logps.detach()))
    return torch.cat(losses).mean()


def distillation_loss(given: Reference, weight: float, top_k: int, stored: bool) -> Tensor:
    """KL to the teacher's likeliest tokens and one outcome for the rest, beside the loss of the right tokens."""
    losses = []
    for one in given.sequences:
        targets = torch.tensor(one.targets[1:])
        with torch.no_grad():
            logs = torch.log_softmax(given.teacher.logits(one.ids)[targets], dim=-1)
            values, ids = logs.topk(top_k, dim=-1)
            values = values.half().float() if stored else values  # on disk they are in fp16
        own = torch.log_softmax(given.model.logits(one.ids)[targets], dim=-1).gather(1, ids)
        rest, own_rest = 1 - values.exp().sum(-1), 1 - own.exp().sum(-1)
        distance = (values.exp() * (values - own)).sum(-1) + rest * (rest.log() - own_rest.log())
        losses.append(weight * distance - (1 - weight) * given.model.logps(one))
    return torch.cat(losses).mean()
