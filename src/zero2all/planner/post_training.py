"""What an objective adds to a step: the KV cache and the time of sampled answers, and the weights of a teacher.

DPO and KTO add nothing to the memory of a GPU: the reference scores each answer once before the first step, and its
log-probabilities, 8 bytes for an answer, stay in main memory. GRPO has no reference, and samples with its own weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from zero2all.base.errors import Z2aError
from zero2all.base.io import read_json
from zero2all.base.workspace import IDENTITY_FILE
from zero2all.model.cost.model_size import count_parameters, kv_cache_bytes_per_token
from zero2all.model.hf_weights import CONFIG, read_hf_config
from zero2all.model.kv_cache import DECODE_ROWS
from zero2all.planner.cluster import Cluster
from zero2all.planner.workload import Layout, Workload
from zero2all.recipe import ModelConfig

TEACHER_BYTES = 2  # a parameter, in bf16
TEACHER_TOKENS = 8192  # of a forward pass of the teacher


@dataclass(frozen=True)
class Rollouts:
    """Answers that a rank samples in a step."""

    answers: int
    rows: int
    """Sampled at a time."""
    length: int
    """Positions of a row: a prompt and its answer."""
    answer_tokens: int
    """At most."""
    cache: int
    """Bytes of keys and values."""


@dataclass(frozen=True)
class TeacherPlan:
    parameters: int
    weights: int
    """Bytes on a rank: sharded as the model is."""
    logits: int
    is_assumed: bool
    """Whether the teacher is assumed to be as large as the model, because it is not here."""


def plan_rollouts(workload: Workload, layout: Layout) -> Rollouts | None:
    """None if no answers are sampled, or elsewhere."""
    objective = workload.objective
    copies, length = objective.plugin.samples_per_prompt(objective), objective.max_answer_tokens
    if not copies:
        return None
    dims = layout.dims
    answers = math.ceil(copies * workload.batch_tokens // workload.seq_len / (dims.dp_replicate * dims.dp_shard))
    rows = min(DECODE_ROWS, answers)
    a_token = kv_cache_bytes_per_token(workload.config, workload.itemsize) / (dims.tp * dims.pp)
    return Rollouts(answers, rows, workload.seq_len, length, round(rows * workload.seq_len * a_token))


def plan_teacher(workload: Workload, layout: Layout) -> TeacherPlan | None:
    objective = workload.objective
    if not objective.plugin.has_teacher:
        return None
    found = _teacher_config(objective.distill.teacher, workload.config.vocab_size)
    parameters = workload.parts.total if found is None else count_parameters(found).total
    return TeacherPlan(
        parameters=parameters,
        weights=math.ceil(TEACHER_BYTES * parameters / layout.shards),
        logits=4 * min(TEACHER_TOKENS, layout.micro_tokens) * workload.config.padded_vocab_size,
        is_assumed=found is None,
    )


def sampling_seconds(workload: Workload, layout: Layout, cluster: Cluster) -> float:
    """Every token of a batch of answers reads the weights and the cache of its rows, on average half full. FSDP gathers
    the weights of each block again for each token."""
    rollouts = plan_rollouts(workload, layout)
    if rollouts is None:
        return 0.0
    gpu, dims = cluster.gpu, layout.dims
    weights = workload.itemsize * workload.parts.total / (dims.tp * dims.pp)
    read = (weights + rollouts.cache / 2) / gpu.memory_bandwidth
    gathered = weights * (1 - 1 / layout.shards) / gpu.link_bandwidth if layout.uses_fsdp else 0.0
    batches = math.ceil(rollouts.answers / rollouts.rows)
    return batches * rollouts.answer_tokens * max(read, gathered)


def _teacher_config(path: Path | None, vocab_size: int | None) -> ModelConfig | None:
    """None if there is no teacher here: a plan needs no files."""
    if path is None:
        return None
    try:
        if (path / CONFIG).exists():
            return read_hf_config(path)
        for run in (path, path / "run"):
            if (run / IDENTITY_FILE).exists():
                return ModelConfig.model_validate(read_json(run / IDENTITY_FILE)["model"])
    except (Z2aError, OSError, ValueError, KeyError):
        return None
    return None
