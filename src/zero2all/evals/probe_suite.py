"""Suites of probes: small questions to a model, each answered by one number from the probabilities of texts.

A suite is a YAML file; see ``probe_suites/`` for those that come with the package.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError

from zero2all.base.errors import RecipeError, RecipeProblem, UsageError
from zero2all.evals.log_likelihood import Score, ScoringRequest
from zero2all.recipe.problems import locate, located_problem
from zero2all.recipe.safe_yaml import MAX_FILE_BYTES, KeyPath, Lines, read_yaml
from zero2all.recipe.types import Mistake, Section, Slug
from zero2all.tokenizer import Tokenizer

SUITES_DIR = Path(__file__).with_name("probe_suites")
Text = Annotated[str, Field(min_length=1)]
Direction = Literal["rise", "fall"]


class Probe(Section):
    """What all kinds have."""

    name: Slug
    """Unique in the suite."""
    language: Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]
    """An ISO 639 code such as ``zh``."""
    category: Slug
    """What is asked about, such as ``facts``: probes of a language and category share a chart."""
    expect: Direction | None = None
    """How the value changes in a model that learns. Default: ``rise``, for a sentence ``fall``."""

    @property
    def metric(self) -> str:
        """What the value is."""
        raise NotImplementedError

    @property
    def expected(self) -> Direction:
        return self.expect or "rise"

    @property
    def digest(self) -> str:
        """Changes with the probe: values of different ones cannot be compared."""
        return hashlib.blake2b(f"{self.metric} {self.model_dump_json()}".encode(), digest_size=8).hexdigest()

    def requests(self, tokenizer: Tokenizer) -> list[ScoringRequest]:
        """The texts to score."""
        raise NotImplementedError

    def value(self, scores: Sequence[Score]) -> float:
        """The number that answers the probe, from the scores of the requests."""
        raise NotImplementedError


class ContinuationProbe(Probe):
    """P(continuation | prompt), such as P(北京 | 中国的首都是).

    With ``alternatives`` the probability of the continuation among them all, so that it is not about how likely the
    prompt is to end there.
    """

    kind: Literal["continuation"]
    prompt: Text
    continuation: Text
    """With its space, where the prompt has none at its end."""
    alternatives: tuple[Text, ...] = ()
    """Wrong continuations, about as long as the right one."""

    @property
    def metric(self) -> str:
        return "probability"

    def mistakes(self) -> Iterator[Mistake]:
        texts = [self.continuation, *self.alternatives]
        if len(set(texts)) < len(texts):
            yield Mistake(
                "the continuation and the alternatives must differ: remove the one that is there twice",
                ("alternatives",),
            )

    def requests(self, tokenizer: Tokenizer) -> list[ScoringRequest]:
        return _split_common(tokenizer, self.prompt, [self.continuation, *self.alternatives])

    def value(self, scores: Sequence[Score]) -> float:
        if len(scores) == 1:
            return math.exp(-scores[0].nats)
        least = min(score.nats for score in scores)
        shares = [math.exp(least - score.nats) for score in scores]
        return shares[0] / sum(shares)


class InstructionProbe(ContinuationProbe):
    """P(continuation | the model is asked for it), such as P({ | asked for JSON).

    Where the tokenizer has a chat template, the prompt is a message of the user and the continuation begins the answer;
    else the continuation follows the prompt on a line of its own.
    """

    kind: Literal["instruction"]  # type: ignore[assignment]

    def requests(self, tokenizer: Tokenizer) -> list[ScoringRequest]:
        if tokenizer.chat_template is None:
            return _split_common(tokenizer, self.prompt + "\n", [self.continuation, *self.alternatives])
        prompt = tokenizer.render_chat([{"role": "user", "content": self.prompt}], add_generation_prompt=True)
        answers = [text.encode() for text in (self.continuation, *self.alternatives)]
        return [
            ScoringRequest(tuple(prompt), tuple(tokenizer.encode_bytes(answer, follows_text=True)))
            for answer in answers
        ]


class SentenceProbe(Probe):
    """Bits per byte of a text; its perplexity is shown too."""

    kind: Literal["sentence"]
    text: Text

    @property
    def metric(self) -> str:
        return "bits per byte"

    @property
    def expected(self) -> Direction:
        return self.expect or "fall"

    def requests(self, tokenizer: Tokenizer) -> list[ScoringRequest]:
        return [_whole(tokenizer, self.text)]

    def value(self, scores: Sequence[Score]) -> float:
        return _bits_per_byte(scores[0], self.text)


class ContrastProbe(Probe):
    """Whether a text is likelier than another: bits per byte of ``worse`` minus bits per byte of ``better``.

    Per byte and not per token: a sentence with a mistake is often split into more tokens, and most of them are easy, so
    that its perplexity per token may be the lower one.
    """

    kind: Literal["contrast"]
    better: Text
    worse: Text

    @property
    def metric(self) -> str:
        return "bits per byte apart"

    def mistakes(self) -> Iterator[Mistake]:
        if self.better == self.worse:
            yield Mistake("the two texts of a contrast must differ", ("worse",))

    def requests(self, tokenizer: Tokenizer) -> list[ScoringRequest]:
        return [_whole(tokenizer, self.better), _whole(tokenizer, self.worse)]

    def value(self, scores: Sequence[Score]) -> float:
        return _bits_per_byte(scores[1], self.worse) - _bits_per_byte(scores[0], self.better)


PROBES: dict[str, type[Probe]] = {
    "continuation": ContinuationProbe,
    "instruction": InstructionProbe,
    "sentence": SentenceProbe,
    "contrast": ContrastProbe,
}


def _kind(probe: Any) -> Any:
    return probe.get("kind") if isinstance(probe, dict) else getattr(probe, "kind", None)


AnyProbe = Annotated[
    Annotated[ContinuationProbe, Tag("continuation")]
    | Annotated[InstructionProbe, Tag("instruction")]
    | Annotated[SentenceProbe, Tag("sentence")]
    | Annotated[ContrastProbe, Tag("contrast")],
    Discriminator(_kind, "kind", f"kind must be one of {', '.join(PROBES)}"),
]


class ProbeSuite(Section):
    """
    >>> suite = load_suite("stories")
    >>> suite.probes[0].name
    """

    name: Slug
    description: str = ""
    probes: Annotated[list[AnyProbe], Field(min_length=1)]

    def mistakes(self) -> Iterator[Mistake]:
        seen: set[str] = set()
        for number, probe in enumerate(self.probes):
            if probe.name in seen:
                yield Mistake(f"the name {probe.name} is there twice: choose another", (f"probes.{number}.name",))
            seen.add(probe.name)


def builtin_suites() -> list[str]:
    """The names of the suites that come with the package."""
    return sorted(path.stem for path in SUITES_DIR.glob("*.yaml"))


def load_suite(target: str | Path) -> ProbeSuite:
    """A YAML file, or a suite of the package by its name. An error lists everything that is wrong, with its line."""
    path = SUITES_DIR / f"{target}.yaml" if str(target) in builtin_suites() else Path(target)
    try:
        with open(path, "rb") as stream:  # which may be a pipe, and may have no end
            text = stream.read(MAX_FILE_BYTES + 1).decode("utf-8")
    except FileNotFoundError:
        known = ", ".join(builtin_suites())
        raise UsageError(f"no suite of probes at {target}: give a YAML file, or one of {known}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the suite {path}: {error}") from None
    values, lines = read_yaml(text, str(path))
    if not isinstance(values, dict):
        raise UsageError(f"{path} must be a mapping with the keys name and probes")
    try:
        return ProbeSuite.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise RecipeError(str(path), [_problem(detail, lines) for detail in details]) from None


def _problem(detail: Any, lines: Lines) -> RecipeProblem:
    location: KeyPath = detail["loc"]
    if location[:1] == ("probes",):
        location = location[:2] + location[3:]  # after the number of a probe pydantic puts its kind
    kind, hint = detail["type"], ""
    message = str(detail["msg"]).removeprefix("Value error, ")
    if kind == "extra_forbidden":
        known = PROBES[detail["loc"][2]] if len(location) == 3 else ProbeSuite
        message, hint = "no such key", f"known: {', '.join(known.model_fields)}"
    elif kind == "missing":
        message = "is required"
    elif kind == "string_type":
        hint = "put quotes around a text that looks like a number"
    return located_problem(location, message, hint, locate(dict(lines), location))


def _split_common(tokenizer: Tokenizer, prompt: str, endings: Sequence[str]) -> list[ScoringRequest]:
    """Endings of a prompt, after the tokens that the prompt shares with all of them.

    A token may cover the end of the prompt and the beginning of an ending. The common tokens make the probabilities of
    all endings conditional on the same text, so that they can be compared.
    """
    context = tokenizer.encode(prompt)
    wholes = [tokenizer.encode(prompt + ending) for ending in endings]
    split = min(_common_length(context, whole) for whole in wholes)
    start = (tokenizer.eos_token_id, *context[:split])
    return [ScoringRequest(start, tuple(whole[split:])) for whole in wholes]


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


def _whole(tokenizer: Tokenizer, text: str) -> ScoringRequest:
    return ScoringRequest((tokenizer.eos_token_id,), tuple(tokenizer.encode(text)))


def _bits_per_byte(score: Score, text: str) -> float:
    return score.nats / math.log(2) / len(text.encode())
