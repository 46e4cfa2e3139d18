"""``README.md`` of an export: what the model is, what it was trained on and how well it does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from zero2all.base.charts.plot import Curve, Plot
from zero2all.base.charts.svg import line_svg
from zero2all.base.charts.table import markdown_table
from zero2all.base.errors import Z2aError
from zero2all.base.io import read_json, write_text
from zero2all.base.units import show_count, show_seconds
from zero2all.recipe import ModelConfig
from zero2all.tokens import TokenStore
from zero2all.track import read_steps
from zero2all.track.eval_report import read_evals, report_markdown
from zero2all.track.goodput import compute_run_goodput
from zero2all.train.run import Run

if TYPE_CHECKING:
    from zero2all.export.run_export import ExportResult

CARD, CURVE = "README.md", "loss.svg"
MAX_POINTS = 400  # of a curve
TRAIN, VALIDATION = "loss", "valid/loss"
PRIVATE_KEYS = {"init", "teacher", "endpoint"}  # paths and services of who trained it


def write_model_card(run: Run, result: ExportResult, config: ModelConfig, out: Path) -> None:
    """``README.md`` and the curve of the loss beside it."""
    steps = {step: metrics for step, metrics in read_steps(run.record_path).items() if step < result.step}
    parts = [
        _front_matter(run),
        f"# {_text(run.recipe.name)}",
        "",
        _summary(run, result),
        "",
        markdown_table(("", ""), _facts(run, result, config).items()),
        "",
        *_usage(run, result),
        *_data(run),
        *_training(run, result, steps, out),
        *_evaluations(run),
        *_parity(result),
    ]
    write_text(out / CARD, "\n".join(parts).rstrip() + "\n")


def _front_matter(run: Run) -> str:
    return (
        yaml.safe_dump_all(
            [{"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["zero2all", *_tags(run)]}],
            explicit_start=True,
            sort_keys=False,
        )
        + "---\n"
    )


def _tags(run: Run) -> list[str]:
    return ["conversational"] if run.recipe.train.objective.is_chat else []


def _summary(run: Run, result: ExportResult) -> str:
    objective, init = run.recipe.train.objective.name, run.initial_weights()
    how = {"pretrain": "pretrained", "sft": "fine-tuned on conversations"}.get(objective, f"trained with {objective}")
    begun = "from random weights" if init is None else f"from {_text(Path(init.path).name)}"
    return f"A language model of {show_count(result.parameters)} parameters, {how} {begun} with zero2all."


def _facts(run: Run, result: ExportResult, config: ModelConfig) -> dict[str, str]:
    facts = {
        "architecture": f"`{result.architecture}`",
        "parameters": f"{result.parameters:,}",
        "layers, hidden size": f"{config.num_hidden_layers}, {config.hidden_size}",
        "context": f"{config.max_position_embeddings:,} tokens",
        "vocabulary": f"{config.vocab_size:,} tokens",
        "dtype": result.dtype,
        "step": f"{result.step:,}",
    }
    if (moe := config.moe) is not None:
        facts["experts"] = f"{moe.num_experts_per_tok} of {moe.num_experts}, {moe.n_shared_experts} shared"
    return facts


def _usage(run: Run, result: ExportResult) -> list[str]:
    name, chat = Path(result.out).name or ".", run.recipe.train.objective.is_chat
    if result.out.endswith(".gguf"):  # llama-cli talks by the chat template, also to a model that never saw one
        command = f"llama-cli -m {name}" if chat else f"llama-completion -m {name} -no-cnv -p 'Once upon a time'"
        return ["## Use", "", "```sh", command, "```", ""]
    prompt = (
        'tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True, '
        'return_dict=True, return_tensors="pt")'
        if chat
        else 'tokenizer("Once upon a time", return_tensors="pt")'
    )
    return [
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        f'model = AutoModelForCausalLM.from_pretrained("{name}")',
        f"inputs = {prompt}",
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))",
        "```",
        "",
    ]


def _data(run: Run) -> list[str]:
    """The mixture, as far as the token store is still there."""
    try:
        tokens = TokenStore(run.recipe.tokens_dir, "train").source_tokens
        epochs = run.plan().epochs_by_source()
    except (Z2aError, OSError):
        sources = ", ".join(_text(source.name) for source in run.recipe.corpus.sources)
        return ["## Data", "", f"Sources: {sources}.", ""] if sources else []
    rows = [(_text(name), show_count(tokens[name]), f"{count:.2f}") for name, count in epochs.items() if count]
    return ["## Data", "", markdown_table(("source", "tokens", "epochs"), rows, "lrr"), ""]


def _training(run: Run, result: ExportResult, steps: dict[int, dict[str, float]], out: Path) -> list[str]:
    parts = ["## Training", ""]
    environment = read_json(run.directory / "environment.json")
    facts = []
    if (tokens := _last(steps, "tokens")) is not None:
        facts.append(f"{show_count(int(tokens))} tokens")
    facts.append(f"{result.step:,} steps")
    facts.append(f"on {_text(str(environment.get('device', 'unknown')))}")
    facts.append(f"in {show_seconds(compute_run_goodput(run.directory).seconds)}")
    parts += [", ".join(facts) + ".", ""]
    losses = [
        f"{title} {value:.4f}"
        for name, title in ((TRAIN, "training"), (VALIDATION, "validation"))
        if (value := _last(steps, name)) is not None
    ]
    if losses:
        parts += [f"Loss: {', '.join(losses)} nats per token.", ""]
    curves = [
        Curve(title, points, colour=number)
        for number, (name, title) in enumerate(((TRAIN, "training"), (VALIDATION, "validation")))
        if len(points := _points(steps, name)) > 1
    ]
    if curves:
        write_text(out / CURVE, line_svg(Plot("loss", "step", "nats per token", curves)))
        parts += [f"![loss]({CURVE})", ""]
    return [*parts, "```yaml", yaml.safe_dump(_recipe(run), sort_keys=False).rstrip(), "```", ""]


def _recipe(run: Run) -> dict[str, Any]:
    """What was chosen, without the paths of a machine."""
    values = run.recipe.model_dump(mode="json", include={"model", "train", "parallel"}, exclude_defaults=True)
    return {key: cleaned for key, value in values.items() if (cleaned := _without_private(value))}


def _without_private(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_private(inner) for key, inner in value.items() if key not in PRIVATE_KEYS}
    return [_without_private(inner) for inner in value] if isinstance(value, list) else value


def _evaluations(run: Run) -> list[str]:
    try:
        evals = read_evals(run.recipe.name, run.directory, run.tokenizer().vocab_size)
    except Z2aError:
        return []  # no checkpoint was evaluated
    lines = report_markdown([evals]).splitlines()
    return [f"#{line}" if line.startswith("#") else line for line in lines] + [""]


def _parity(result: ExportResult) -> list[str]:
    if result.max_difference is None:
        return []
    what = "log-probabilities" if result.engine == "llama.cpp" else "logits"
    return [
        "## Parity",
        "",
        f"Compared in {result.engine} with the model that was trained: {what} differ by at most "
        f"{result.max_difference:.1e}.",
        "",
    ]


def _last(steps: dict[int, dict[str, float]], name: str) -> float | None:
    return next((metrics[name] for metrics in reversed(steps.values()) if name in metrics), None)


def _points(steps: dict[int, dict[str, float]], name: str) -> list[tuple[float, float]]:
    points = [(float(step), metrics[name]) for step, metrics in steps.items() if name in metrics]
    stride = max(1, len(points) // MAX_POINTS)
    return points[::stride]


def _text(text: str) -> str:
    """Names are data, not markup."""
    return "".join(f"\\{character}" if character in "\\|<>`[]*_#" else character for character in text)
