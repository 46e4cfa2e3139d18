"""Checkpoints in lm-eval, without conversion. Needs lm-eval: ``pip install 'zero2all[lm-eval]'``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from zero2all.base.errors import UsageError
from zero2all.evals.log_likelihood import ScoringRequest, encode_pair, score
from zero2all.evals.target import EvalTarget
from zero2all.generation import SamplingParams, generate_batch

MAX_TOKENS = 256  # of a generated answer where the task gives no limit, as in lm-eval's own backends
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
GENERATION = SAMPLING | {"until", "max_gen_toks", "do_sample"}


class Z2allLM(LM):  # type: ignore[misc]
    """A model as lm-eval sees it.

    >>> lm_eval.simple_evaluate(model=Z2allLM(open_target("runs/first")), tasks=["arc_easy"])

    A prompt follows an end-of-text token, as a document does in training. Chat templates are not applied: lm-eval
    renders them to text, and in text nothing is a special token here.
    """

    def __init__(self, target: EvalTarget) -> None:
        super().__init__()
        self.target = target
        self.max_length = target.model.config.max_position_embeddings

    @property
    def tokenizer_name(self) -> str:
        return str(self.target.directory)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        scores = self._score([encode_pair(self.target.tokenizer, *request.args) for request in requests])
        for request, answer in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return scores

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Every token of a text once, in windows of the whole context."""
        tokenizer = self.target.tokenizer
        windows: list[ScoringRequest] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            tokens = tokenizer.encode(request.args[0])
            for window in get_rolling_token_windows(tokens, tokenizer.eos_token_id, self.max_length, 1):
                context, continuation = make_disjoint_window(window)
                windows.append(ScoringRequest(tuple(context), tuple(continuation)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for index, (log_likelihood, _) in zip(owners, self._score(windows), strict=True):
            totals[index] += log_likelihood
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance]) -> list[str]:
        by_params: dict[SamplingParams, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            by_params[_sampling_params(request.args[1])].append(index)
        texts = [""] * len(requests)
        for params, indices in by_params.items():
            prompts = [requests[index].args[0] for index in indices]
            completions = generate_batch(self.target.model, self.target.tokenizer, prompts, params)
            for index, completion in zip(indices, completions, strict=True):
                texts[index] = completion.text
                self.cache_hook.add_partial("generate_until", requests[index].args, completion.text)
        return texts

    def _score(self, requests: list[ScoringRequest]) -> list[tuple[float, bool]]:
        return [(-one.nats, one.greedy) for one in score(self.target.model, requests)]


@dataclass(frozen=True)
class TaskMetric:
    """A metric of a task."""

    task: str
    metric: str
    value: float
    stderr: float | None
    items: int


def run_lm_eval(
    target: EvalTarget,
    tasks: Sequence[str],
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> list[TaskMetric]:
    """What lm-eval measures on its tasks, and on those with a YAML file in ``include_path``."""
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise UsageError(
            f"lm-eval has no task {unknown[0]!r}: 'lm_eval ls tasks' lists them, --include-path adds yours"
        )
    found = lm_eval.simple_evaluate(
        model=Z2allLM(target), tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, task_manager=manager
    )
    return _task_metrics(found)


def _task_metrics(found: dict[str, Any]) -> list[TaskMetric]:
    metrics = []
    for task, values in found["results"].items():
        items = found["n-samples"].get(task, {}).get("effective", 0)
        for name, value in values.items():
            metric, _, rest = name.partition(",")
            if isinstance(value, int | float) and rest and not metric.endswith("_stderr"):
                stderr = values.get(f"{metric}_stderr,{rest}")
                kept = float(stderr) if isinstance(stderr, int | float) else None
                metrics.append(
                    TaskMetric(task, metric if rest == "none" else f"{metric} ({rest})", float(value), kept, items)
                )
    return metrics


def _sampling_params(arguments: dict[str, Any]) -> SamplingParams:
    if unknown := sorted(arguments.keys() - GENERATION):
        raise UsageError(f"the task sets {unknown[0]}, and generation has no such parameter")
    until = arguments.get("until") or ()
    samples = arguments.get("do_sample", arguments.get("temperature", 0) > 0)
    sampling = {name: arguments[name] for name in SAMPLING & arguments.keys()}
    return SamplingParams(
        max_tokens=arguments.get("max_gen_toks", MAX_TOKENS),
        stop=(until,) if isinstance(until, str) else tuple(filter(None, until)),
        **{"top_k": 0, **sampling, "temperature": sampling.get("temperature", 1.0) if samples else 0.0},
    )
