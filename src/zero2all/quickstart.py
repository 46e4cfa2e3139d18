"""``z2a quickstart``: every stage in a row, from raw text to a model that generates text."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from zero2all.base.console import heading, progress, say, warn, wrap
from zero2all.base.errors import UsageError
from zero2all.base.io import write_text
from zero2all.base.tasks import TaskEngine
from zero2all.base.units import show_bytes, show_count, show_seconds
from zero2all.corpus import build_corpus, recommended_workers, summary_lines
from zero2all.evals import evaluate_bpb
from zero2all.generation import SamplingParams, StoryEvaluation, evaluate_stories, generate_batch, story_quality_line
from zero2all.generation.story_quality import ChatQuality, evaluate_chat, held_out_conversations
from zero2all.model import Z2all
from zero2all.recipe import Recipe, builtin_recipe_path, load_recipe, recipe_yaml
from zero2all.recipe.source_names import to_source_name
from zero2all.storyworld import LANGUAGES, StoryQuality, generate_stories
from zero2all.storyworld.conversations import generate_conversations, handwritten_conversations
from zero2all.tokenizer import Tokenizer, train_tokenizer
from zero2all.tokens import TokenStore, build_tokens, opening_prompts
from zero2all.track.eval_record import LossEvaluation
from zero2all.track.step_text import COLUMNS
from zero2all.train import Run, ScheduleChangedError, train
from zero2all.train.data_in_use import refuse_store_change, refuse_tokenizer_change, warn_about_new_documents

STORIES_PER_LANGUAGE = 4500  # the quickstart reads each of them less than twice
CONVERSATIONS_PER_LANGUAGE = 3000
HELD_OUT_PER_LANGUAGE = 50
CHAT = "chat"  # the directory below ``out`` of the fine-tuned model
SHARED_KEYS = ("seed=", "tokenizer.", "model.", "model=", "train.seq_len=", "train.device=")  # of both recipes
SHOWN_KINDS = ("question", "sum", "refusal")
CHECKED_STORIES = 200
NUM_GENERATIONS = 3


@dataclass(frozen=True)
class SourceEntry:
    """A source in the recipe."""

    name: str
    paths: list[str]


@dataclass(frozen=True)
class GeneratedSample:
    """Generated text."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Turn:
    """The last question of a conversation, and the model's answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class ChatResult:
    """The model after fine-tuning."""

    out: str
    conversations: int
    steps: int
    bits_per_byte: float
    """Bits per byte of reference answers in the validation set."""
    base_bits_per_byte: float
    """Bits per byte of the same answers before fine-tuning."""
    quality: ChatQuality
    transcripts: list[Turn]


@dataclass(frozen=True)
class QuickstartResult:
    out: str
    documents: int
    bytes: int
    tokens: int
    parameters: int
    layers: int
    steps: int
    loss: float | None
    validation: LossEvaluation | None
    """None without a validation set."""
    stories: StoryQuality | None
    """The quality of generated stories, if the model was trained on stories."""
    samples: list[GeneratedSample]
    seconds: dict[str, float]
    """The duration of each stage."""
    chat: ChatResult | None = None
    """With ``--chat``."""

    def to_json(self) -> dict[str, Any]:
        """The object that ``z2a quickstart --json`` prints: the metrics of the validation set are beside the others."""
        fields = asdict(self)
        validation, samples, seconds = (fields.pop(name) for name in ("validation", "samples", "seconds"))
        chat = fields.pop("chat")
        own = {**fields, **(validation or {}), "samples": samples, "seconds": seconds}
        return own if chat is None else {**own, "chat": chat}


def quickstart(
    out: Path, corpus: list[Path] | None = None, overrides: list[str] | None = None, chat: list[str] | None = None
) -> QuickstartResult:
    """Build documents, tokenizer, tokens and a model below ``out``; evaluate it and generate text.

    With ``chat``, the overrides of that recipe, the model is then fine-tuned on conversations about the built-in
    stories, in ``out/chat``. If interrupted, the same call resumes where it stopped.
    """
    recipe = quickstart_recipe(out, corpus or [], overrides or [])
    _refuse_other_recipe(recipe, out / "recipe.yaml", overrides or [])
    write_text(out / "recipe.yaml", recipe_yaml(recipe))
    _say_stage_of_overrides(out, overrides if chat is not None and overrides else [])
    seconds: dict[str, float] = {}
    if not corpus:
        with _timed_stage("0/5 stories: a corpus for the first model", "stories", seconds):
            _write_stories(out / "stories", recipe.seed)
    # The recipe is the same, so if the data would not be, the text has changed.
    remedy = f": 'z2a train {out}' resumes the run as it is; for the text that there is now choose another --out"

    with _timed_stage("1/5 corpus: raw files to documents", "corpus", seconds):
        workers = TaskEngine(workers=recommended_workers(recipe.corpus))
        warn_first = partial(warn_about_new_documents, recipe)
        documents = build_corpus(recipe.corpus, recipe.documents_dir, workers, warn_first)
        for line in summary_lines(documents):
            say(line)
    with _timed_stage("2/5 tokenizer: documents to a vocabulary", "tokenizer", seconds):
        refuse = partial(refuse_tokenizer_change, recipe.tokenizer_dir, out, remedy)
        vocabulary = train_tokenizer(
            recipe.tokenizer, recipe.documents_dir, recipe.tokenizer_dir, before_replace=refuse
        )
        say(f"{vocabulary.vocab_size} tokens from {show_bytes(vocabulary.trained_on_bytes)} of text")
    with _timed_stage("3/5 tokens: documents to a token store", "tokens", seconds):
        tokens = build_tokens(
            recipe.tokens,
            recipe.documents_dir,
            recipe.tokenizer_dir,
            recipe.tokens_dir,
            before_replace=partial(refuse_store_change, recipe.tokens_dir, out, remedy),
        )
        say(f"{show_count(tokens.tokens)} tokens, {tokens.bytes / tokens.tokens:.2f} bytes each")
    has_validation = TokenStore(recipe.tokens_dir, "valid").has_full_sequence(recipe.train.seq_len)
    if not has_validation:
        warn("no validation set: the model will not be evaluated. Give more text, or raise corpus.holdout")
    with _timed_stage("4/5 train: tokens to a model", "train", seconds):
        try:
            trained = train(recipe, evaluate=evaluate_bpb if has_validation else None)
        except ScheduleChangedError as error:
            example = f"z2a train {out}/recipe.yaml --extend {error.suggestion}"
            raise ScheduleChangedError(f"{error}\nfor example: {example}", error.suggestion) from error
    with _timed_stage("5/5 evals: the model on text it has not seen", "evals", seconds):
        run = Run.open(recipe.run_dir)
        model, tokenizer = run.load_model(), run.tokenizer()
        validation = evaluate_bpb(model, tokenizer, recipe) if has_validation else None
        stories = evaluate_stories(model, tokenizer, CHECKED_STORIES, recipe.seed) if recipe.evals.stories else None
        samples = _story_samples(stories) if stories else _prompted_samples(model, tokenizer, recipe)
    return QuickstartResult(
        out=str(out),
        documents=documents.documents,
        bytes=documents.bytes,
        tokens=tokens.tokens,
        parameters=trained.parameters,
        layers=recipe.model.num_hidden_layers,
        steps=trained.steps,
        loss=trained.loss,
        validation=validation,
        stories=stories.quality if stories else None,
        samples=samples,
        seconds=seconds,
        chat=_fine_tune(recipe, model, chat, seconds) if chat is not None else None,
    )


def _say_stage_of_overrides(out: Path, overrides: list[str]) -> None:
    if own := [text for text in overrides if not text.startswith(SHARED_KEYS)]:
        recipe = out / CHAT / "recipe.yaml"
        say(f"{', '.join(own)}: for pretraining, stages 1 to 5. Fine-tuning has its own recipe, {recipe}")


def _fine_tune(base: Recipe, base_model: Z2all, overrides: list[str], seconds: dict[str, float]) -> ChatResult:
    """Conversations to a model that answers, below ``out/chat``."""
    out = base.out / CHAT
    with _timed_stage("6/7 conversations: what to ask and to answer", "conversations", seconds):
        paths = _write_conversations(out / "conversations", base.seed)
        recipe = _chat_recipe(base, out, paths, overrides)
        write_text(out / "recipe.yaml", recipe_yaml(recipe))
        documents = build_corpus(recipe.corpus, recipe.documents_dir)
        build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
        say(f"{documents.documents} conversations in {out}")
    with _timed_stage("7/7 fine-tuning: a model that answers", "fine-tuning", seconds):
        trained = train(recipe)
        run = Run.open(recipe.run_dir)
        model, tokenizer = run.load_model(), run.tokenizer()
        before, after = (evaluate_bpb(one, tokenizer, recipe).bits_per_byte for one in (base_model, model))
        evaluation = evaluate_chat(model, tokenizer, held_out_conversations(base.seed, HELD_OUT_PER_LANGUAGE))
    shown = evaluation.first_of(SHOWN_KINDS)
    turns = [Turn(answer.conversation.prompt[-1]["content"], answer.text) for answer in shown]
    return ChatResult(str(out), documents.documents, trained.steps, after, before, evaluation.quality, turns)


def _chat_recipe(base: Recipe, out: Path, paths: dict[str, Path], overrides: list[str]) -> Recipe:
    sources = [{"name": language, "kind": "chat", "paths": [str(path)]} for language, path in paths.items()]
    places = [
        f"out={_inline_yaml(str(out.absolute()))}",
        f"seed={base.seed}",
        f"corpus.sources={_inline_yaml(sources)}",
        f"tokenizer.dir={_inline_yaml(str(base.tokenizer_dir.absolute()))}",
        f"model={_inline_yaml(base.model.model_dump(mode='json', exclude_unset=True))}",
        f"train.init={_inline_yaml(str(base.run_dir.absolute()))}",
        f"train.seq_len={base.train.seq_len}",
        f"train.device={base.train.device}",
    ]
    return load_recipe(builtin_recipe_path("chat.yaml"), [*overrides, *places])


def _write_conversations(directory: Path, seed: int) -> dict[str, Path]:
    """A file of conversations for each language: generated ones, and those written by hand. One that exists is kept."""
    paths = {language: directory / f"{language}.jsonl" for language in LANGUAGES}
    for language, path in paths.items():
        if path.exists():
            continue
        lines: list[str] = []
        with progress(f"writing conversations ({language})", CONVERSATIONS_PER_LANGUAGE) as advance:
            for one in generate_conversations(language, seed, CONVERSATIONS_PER_LANGUAGE):
                lines.append(json.dumps({"messages": one.messages}, ensure_ascii=False) + "\n")
                advance(1)
        by_hand = [{"messages": one.messages} for one in handwritten_conversations(language)]
        lines += [json.dumps(one, ensure_ascii=False) + "\n" for one in by_hand]
        write_text(path, "".join(lines))
    return paths


def _write_stories(directory: Path, seed: int) -> None:
    """A file of stories for each language; one that exists is kept."""
    for language in LANGUAGES:
        path = directory / f"{language}.jsonl"
        if path.exists():
            continue
        lines: list[str] = []
        with progress(f"writing stories ({language})", STORIES_PER_LANGUAGE) as advance:
            for story in generate_stories(language, seed, STORIES_PER_LANGUAGE):
                lines.append(json.dumps({"text": story}, ensure_ascii=False) + "\n")
                advance(1)
        write_text(path, "".join(lines))
        say(f"{len(lines)} stories in {path}")


def _story_samples(stories: StoryEvaluation) -> list[GeneratedSample]:
    return [GeneratedSample("", text) for language in LANGUAGES for text in stories.first_of(language, NUM_GENERATIONS)]


def _prompted_samples(model: Z2all, tokenizer: Tokenizer, recipe: Recipe) -> list[GeneratedSample]:
    prompts = recipe.evals.prompts[:NUM_GENERATIONS] or opening_prompts(recipe.tokens_dir, tokenizer, NUM_GENERATIONS)
    params = SamplingParams(max_tokens=80, temperature=0.6, seed=recipe.seed)
    completions = generate_batch(model, tokenizer, prompts, params)
    return [GeneratedSample(prompt, completion.text) for prompt, completion in zip(prompts, completions, strict=True)]


def quickstart_recipe(out: Path, corpus: list[Path], overrides: list[str]) -> Recipe:
    """The built-in recipe with the user's text, or with generated stories if none is given."""
    for override in overrides:
        if override.startswith(("out=", "corpus.sources=")):
            raise UsageError(f"{override!r}: the quickstart takes --out and --corpus for that")
    missing = [str(path) for path in corpus if not path.exists()]
    if missing:
        raise UsageError(f"--corpus: nothing at {', '.join(missing)}")
    stories = [SourceEntry(language, [str(out.absolute() / "stories" / f"{language}.jsonl")]) for language in LANGUAGES]
    sources = _group_sources(corpus) if corpus else stories
    places = [
        f"out={_inline_yaml(str(out.absolute()))}",
        f"corpus.sources={_inline_yaml([asdict(source) for source in sources])}",
    ]
    name = "quickstart.yaml" if corpus else "stories.yaml"
    return load_recipe(builtin_recipe_path(name), [*overrides, *places])


def _inline_yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
    return text


def _refuse_other_recipe(recipe: Recipe, path: Path, overrides: list[str]) -> None:
    """An earlier quickstart in the same directory is resumed or left as it is, never mixed with another."""
    if not path.exists():
        return
    before = load_recipe(path)
    changed = [
        name for name in ("seed", "corpus", "tokenizer", "model") if getattr(before, name) != getattr(recipe, name)
    ]
    if not changed:
        return
    remedy = "choose another --out, or remove that directory"
    if not {"corpus", "tokenizer"} & set(changed):
        command = shlex.join(["z2a", "train", str(path.parent), *overrides, "--name", "NAME"])
        remedy = f"to train another run on the same tokens: {command}; or {remedy}"
    raise UsageError(f"{path.parent} holds a quickstart with another {' and '.join(changed)}; {remedy}")


def summary_text(result: QuickstartResult) -> str:
    """The summary printed at the end."""
    lines = [""]
    for number, sample in enumerate(result.samples, 1):
        marked = f"{sample.prompt}▸{sample.text}" if sample.prompt else sample.text
        lines += [f"── sample {number} " + "─" * 40, *wrap(marked, COLUMNS)]
    out = result.out
    deeper = f"model.num_hidden_layers={result.layers + 1} --name deeper"
    next_commands: tuple[tuple[str, str], ...] = (
        (f"z2a watch {out}", "curves, samples and health checks in a browser"),
        (f"z2a watch {out} --html {out}/report.html", "the same as one file"),
        (f'z2a chat {out} --prompt "..."', "generate text"),
        (f"z2a train {out} {deeper}", "another model on the same tokens"),
        (f"z2a compare {out}/run {out}/deeper", "what differs, and which is better"),
        (f"z2a train {out} train.steps={2 * result.steps} --extend rewarm", "train it further"),
        (f"z2a export {out} --to {out}/hf", "a directory for transformers, vLLM, llama.cpp"),
    )
    if result.chat is not None:
        next_commands = ((f"z2a chat {result.chat.out}", "talk to the model"), *next_commands)
        for turn in result.chat.transcripts:
            lines += ["── conversation " + "─" * 36, *wrap(f"> {turn.question}", COLUMNS), *wrap(turn.answer, COLUMNS)]
    width = max(len(command) for command, _ in next_commands)
    lines += [
        "─" * 52,
        *_bits_per_byte_lines(result.validation),
        *([story_quality_line(result.stories)] if result.stories else []),
        *(_chat_lines(result.chat) if result.chat else []),
        f"everything is in {out}, made in {show_seconds(sum(result.seconds.values()))}",
        "",
        "what to do next:",
        *(f"  {command:<{width}}  {purpose}" for command, purpose in next_commands),
    ]
    return "\n".join(lines)


def _chat_lines(chat: ChatResult) -> list[str]:
    return [
        f"chat: {chat.quality}",
        f"reference answers: {chat.bits_per_byte:.3f} bits per byte, {chat.base_bits_per_byte:.3f} before fine-tuning",
    ]


def _bits_per_byte_lines(result: LossEvaluation | None) -> list[str]:
    if result is None:
        return ["there is no validation set, so there is no bits-per-byte"]
    below = f"{100 * (result.below_unigram or 0):.0f}% below a unigram model ({result.unigram_bits_per_byte:.3f})"
    return [f"validation bits-per-byte {result.bits_per_byte:.3f}, {below}"] + [
        f"  {name}: {metrics.bits_per_byte:.3f} against {metrics.unigram_bits_per_byte:.3f}"
        for name, metrics in result.sources.items()
    ]


@contextmanager
def _timed_stage(title: str, name: str, seconds: dict[str, float]) -> Iterator[None]:
    heading(title)
    start = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - start, 1)
    say(f"done in {show_seconds(seconds[name])}")


def _group_sources(paths: list[Path]) -> list[SourceEntry]:
    """A directory is a source; files given from one directory are one source together, as in ``notes/*.txt``."""
    grouped: dict[Path, list[str]] = {}
    for path in paths:
        absolute = path.absolute()
        grouped.setdefault(absolute if absolute.is_dir() else absolute.parent, []).append(str(absolute))
    sources: list[SourceEntry] = []
    for top, members in grouped.items():
        # One file gives its own name, several the name of their directory.
        label = Path(members[0]).name.split(".")[0] if len(members) == 1 else top.name
        base = to_source_name(label)
        taken = [source.name for source in sources]
        name = next(name for n in count(1) if (name := base if n == 1 else f"{base}-{n}") not in taken)
        sources.append(SourceEntry(name, members))
    return sources
