"""The search of a mixture: what is planned, refused, resumed, fitted, said and suggested. Training is made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from tests.conftest import tiny_recipe
from tests.experiments.helpers import Training, result
from zero2all.base.charts.svg import line_svg
from zero2all.base.charts.terminal import line_text
from zero2all.base.errors import UsageError
from zero2all.cli.main import app
from zero2all.experiments import build_report, open_experiment, report_text, runner
from zero2all.experiments.mixtures import SHARE_KEY, plan_mixtures
from zero2all.experiments.report import effect_text
from zero2all.experiments.summary import summarize
from zero2all.experiments.target import parse_target
from zero2all.experiments.variants import ExperimentPlan
from zero2all.recipe import load_recipe, recipe_yaml
from zero2all.tokens import TokenStore
from zero2all.track.experiment_record import ExperimentRecord, MixtureSource, VariantResult, read_experiment

SOURCES = ("code", "en", "zh")
POOR = "zh"  # helps no validation source
TARGET = {"en": 1.0, "code": 1.0}


@pytest.fixture
def recipe(workspace: Path, tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(recipe_yaml(tiny_recipe(workspace, f"out={tmp_path}/out")), encoding="utf-8")
    return path


@pytest.fixture
def search(recipe: Path, training: Training, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``z2a compare``, with results that depend on the mixture of the variant."""
    noise = np.random.default_rng(3)

    def read(directory: Path) -> VariantResult:
        mixture = yaml.safe_load(training.recipes[directory.name])["train"]["mixture"]
        bits = {
            name: 2 - 0.2 * np.log(mixture[name] + 0.05) + 0.002 * noise.standard_normal() for name in ("en", "code")
        }
        metrics = {"bits_per_byte": 3.0, "bits_per_byte/zh": 3.0, **{f"bits_per_byte/{k}": v for k, v in bits.items()}}
        return replace(result(3.0), metrics=metrics)

    monkeypatch.setattr(runner, "_read_result", read)

    def sweep(*words: object) -> Result:
        return CliRunner().invoke(app, ["compare", str(recipe), *map(str, words)])

    return sweep


def shares_of(plan: ExperimentPlan) -> dict[str, dict[str, float]]:
    return {variant.record.group: dict(variant.recipe.train.mixture) for variant in plan.variants}


def test_a_search_has_the_mixture_of_the_recipe_equal_weights_and_random_ones(recipe: Path, workspace: Path) -> None:
    plan = plan_mixtures(recipe, [], 12, 1)
    drawn = shares_of(plan)
    assert list(drawn) == ["recipe", "equal", *(f"mixture-{number}" for number in range(1, 11))]
    tokens = TokenStore(workspace / "tokens", "train").source_tokens
    natural = {name: count / sum(tokens.values()) for name, count in tokens.items()}
    assert drawn["recipe"] == pytest.approx(natural, abs=1e-4)
    assert set(drawn["equal"].values()) == {0.3333}
    assert all(sum(shares.values()) == pytest.approx(1, abs=2e-4) for shares in drawn.values())
    assert all(min(shares.values()) > 0 for shares in drawn.values())
    spread = np.std([list(shares.values()) for shares in drawn.values()], axis=0)
    assert spread.min() > 0.05
    ranges = [(min(one), max(one)) for one in zip(*(shares.values() for shares in drawn.values()), strict=True)]
    assert all(low < 0.05 and high > 0.6 for low, high in ranges), "every source from little to most of it"
    assert plan.keys == [f"{SHARE_KEY}{name}" for name in tokens]
    assert plan.variants[3].record.values == {f"{SHARE_KEY}{name}": share for name, share in drawn["mixture-2"].items()}
    assert plan.target == dict.fromkeys(tokens, 1.0)


def test_the_same_mixtures_are_drawn_again_and_more_of_them_extend_the_search(recipe: Path) -> None:
    few, many = plan_mixtures(recipe, [], 8, 1), plan_mixtures(recipe, [], 14, 2)
    assert shares_of(few).items() <= shares_of(many).items()
    assert {one.record.key for one in few.variants} <= {one.record.key for one in many.variants}


def test_a_mixture_in_the_recipe_says_which_sources_are_mixed_and_where_the_search_begins(recipe: Path) -> None:
    plan = plan_mixtures(recipe, ["train.mixture={en: 3, code: 1}", "train.max_epochs=2"], 6, 1)
    drawn = shares_of(plan)
    assert drawn["recipe"] == {"en": 0.75, "code": 0.25}
    assert {frozenset(shares) for shares in drawn.values()} == {frozenset({"en", "code"})}
    assert {one.recipe.train.max_epochs for one in plan.variants} == {None}, "it would change the mixtures"
    even = shares_of(plan_mixtures(recipe, ["train.mixture={en: 1, code: 1}"], 6, 1))
    assert list(even)[:2] == ["recipe", "mixture-1"], "equal weights once"
    assert len(even) == 6


@pytest.mark.parametrize(
    ("words", "mixtures", "target", "message"),
    [
        (["train.mixture={en: 1}"], 8, {}, "nothing to mix: the recipe trains on 1 source"),
        ([], 5, {}, "--mixtures 5 is too few for 3 sources: use at least 6, better 12"),
        ([], 513, {}, "more than a search can have"),
        ([], 8, {"math": 1.0}, "there is no validation text of math.*there is some of code, en, zh"),
        (["train.optimizer.lr=1e-3,2e-3"], 8, {}, "varies only the mixture"),
        (["seed=3"], 8, {}, "see --seeds"),
        (["train.seq_len=64", "train.mixture={en: 1, code: 2}", "train.batch_tokens=1Ki",
          "train.micro_batch_tokens=null", "train.steps=null",
          "train.stages=[{name: a, steps: 2}, {name: b, steps: 2, mixture: {en: 1}}]"],
         8, {}, "stage b has its own mixture"),
    ],
)  # fmt: skip
def test_what_is_refused(recipe: Path, words: list[str], mixtures: int, target: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_mixtures(recipe, words, mixtures, 1, target=target)


@pytest.mark.parametrize(
    "text", ["zh", "zh=x", "=1", "zh=-1", "zh=nan", "zh=inf", "zh=1,,en=1", "zh=0", "zh=1,zh=2", ""]
)
def test_a_target_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--target"):
        parse_target(text)


def test_more_runs_than_a_record_holds_are_refused(recipe: Path) -> None:
    with pytest.raises(UsageError, match="5120 runs are more than an experiment can have"):
        plan_mixtures(recipe, [], 512, 10)


def test_stages_without_a_mixture_have_that_of_the_variant(recipe: Path) -> None:
    words = ["train.steps=null", "train.stages=[{name: a, steps: 2}, {name: b, steps: 2, max_epochs: 3}]"]
    plan = plan_mixtures(recipe, words, 6, 1)
    stages = plan.variants[4].recipe.train.resolved_stages()
    assert [dict(stage.mixture) for stage in stages] == [shares_of(plan)["mixture-3"]] * 2
    assert [stage.max_epochs for stage in stages] == [None, None]


def test_the_poor_source_is_found_and_the_suggestion_is_a_recipe(
    search: Callable[..., Result], recipe: Path, tmp_path: Path
) -> None:
    done = search("--mixtures", 10, "--target", "en=1,code=1,zh=0", "--name", "mix", "--budget", "5-steps")
    assert done.exit_code == 0, done.output
    directory = tmp_path / "out" / "experiments" / "mix"
    suggested = load_recipe(directory / "suggested.yaml")
    before = load_recipe(recipe)
    mixture = suggested.train.mixture
    assert mixture.get(POOR, 0) < 0.1 < min(mixture["en"], mixture["code"])
    assert sum(mixture.values()) == pytest.approx(1, abs=0.002)
    assert all(round(share, 3) == share for share in mixture.values())
    assert (suggested.name, suggested.run) == ("mix-suggested", "mix-suggested")
    assert suggested.train.steps == before.train.steps, "the length is that of the recipe"
    assert suggested.tokens_dir == before.tokens_dir
    assert "1% more of zh raises the target by" in done.output
    assert "1% more of en lowers the target by" in done.output
    assert "1% of the tokens of a run is 30.72 tokens" in done.output
    check = f"z2a compare {directory}/suggested.yaml {recipe} --seeds 3 --budget 5-steps --target en=1,code=1"
    assert check in done.output
    assert (directory / "sweep.svg").exists()


def test_the_record_has_the_fit(search: Callable[..., Result], tmp_path: Path) -> None:
    done = search("--mixtures", 10, "--target", "en=1,code=1", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["experiment"]
    assert (found["kind"], found["name"], found["target"]) == ("mixture-search", "mixtures", {"en": 1.0, "code": 1.0})
    fit = found["fit"]
    assert fit["mixtures"] == 10
    assert fit["error"] < 0.3 * fit["mean_error"]
    assert fit["rank_correlation"] > 0.8
    assert fit["suggested_bits_per_byte"] < fit["recipe_bits_per_byte"]
    sources = {one["source"]: one for one in fit["sources"]}
    assert min(sources, key=lambda name: sources[name]["suggested"]) == POOR
    for one in sources.values():
        assert one["low"] <= one["effect"] <= one["high"]
        assert one["effect"] == pytest.approx(np.mean(list(one["effects"].values())))
    en = sources["en"]
    # d/dw of 2 - 0.2 log(w + 0.05), by 1% of the tokens
    assert en["effects"]["en"] == pytest.approx(-0.002 / (en["recipe"] + 0.05), rel=0.15)
    assert sorted(found["groups"], key=lambda group: group["bits_per_byte"]) == found["groups"]


def test_a_stopped_search_is_resumed_and_another_target_needs_no_runs(
    search: Callable[..., Result], training: Training, tmp_path: Path
) -> None:
    training.script = lambda name: "exit 0" if len(training.calls) < 4 else "echo 'error: no memory'; exit 1"
    done = search("--mixtures", 7, "--target", "en=1")
    assert done.exit_code == 0, done.output
    assert "there is no fit yet: 3 mixtures have a result, 6 are needed" in done.output
    assert not (tmp_path / "out/experiments/mixtures/suggested.yaml").exists()
    training.script = lambda name: "exit 0"
    finished = list(training.calls)[:3]
    training.calls.clear()
    done = search("--mixtures", 7, "--target", "en=1")
    assert len(training.calls) == 4
    assert not set(training.calls) & set(finished)
    assert "suggestion written to" in done.output
    other = search("--mixtures", 7, "--target", "code=1")
    assert len(training.calls) == 4
    path = tmp_path / "out/experiments/mixtures"
    assert load_recipe(path / "suggested.yaml").train.mixture["code"] > 0.6
    assert "code=1" in other.output
    stored = read_experiment(path / "experiment.json")
    assert stored.target == {"code": 1.0}
    assert stored.fit is not None
    assert max(stored.fit.sources, key=lambda one: one.suggested or 0).source == "code", "the page shows it too"
    text = report_text(build_report(open_experiment(path, {"en": 1.0})))
    assert "1% more of code raises the target" in text


def test_a_fit_to_noise_suggests_nothing_and_says_so(
    search: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    noise = np.random.default_rng(2)
    suggestion = tmp_path / "out/experiments/mixtures/suggested.yaml"
    suggestion.parent.mkdir(parents=True)
    suggestion.write_text("of an earlier search")

    def read(directory: Path) -> VariantResult:
        bits = 2 + noise.random()
        return replace(result(bits), metrics={f"bits_per_byte{end}": bits for end in ("", "/en", "/zh", "/code")})

    monkeypatch.setattr(runner, "_read_result", read)
    done = search("--mixtures", 8)
    assert done.exit_code == 0, done.output
    assert "does not predict clearly better than the mean, so there is no suggestion" in done.output, done.output
    assert not suggestion.exists()


def test_seeds_of_a_mixture_are_averaged(search: Callable[..., Result], tmp_path: Path) -> None:
    assert search("--mixtures", 8, "--seeds", 2, "--target", "en=1,code=1").exit_code == 0
    record = open_experiment(tmp_path / "out/experiments/mixtures").record
    assert record.fit is not None
    assert (len(record.variants), record.fit.mixtures) == (16, 8)
    printed = report_text(build_report(open_experiment(tmp_path / "out/experiments/mixtures")))
    assert "is best" in printed, "the verdict of a sweep"


def test_the_plot_has_a_curve_for_each_source_and_the_recipe_on_it(
    search: Callable[..., Result], tmp_path: Path
) -> None:
    search("--mixtures", 8, "--target", "en=1,code=1")
    plot = open_experiment(tmp_path / "out/experiments/mixtures").record.plot
    assert plot is not None
    assert {curve.label for curve in plot.curves} == set(SOURCES)
    falls = {curve.label: curve.line[0][1] > curve.line[-1][1] for curve in plot.curves}
    assert not falls[POOR]
    assert len({curve.points[0][1] for curve in plot.curves}) == 1
    assert line_svg(plot).count("<polyline") == 3
    assert "share of the source" in line_text(plot).plain


def test_a_record_that_no_search_has_written_has_no_fit(search: Callable[..., Result], tmp_path: Path) -> None:
    search("--mixtures", 8, "--target", "en=1,code=1")
    record = open_experiment(tmp_path / "out/experiments/mixtures").record
    assert summarize(record).fit is not None

    def with_values(change: Callable[[dict[str, Any]], dict[str, Any]]) -> ExperimentRecord:
        return replace(record, variants=[replace(one, values=change(dict(one.values))) for one in record.variants])

    damaged = {
        "no values": with_values(lambda values: {}),
        "text as a share": with_values(lambda values: {**values, f"{SHARE_KEY}en": "x"}),
        "a negative share": with_values(lambda values: {**values, f"{SHARE_KEY}en": -3}),
        "no target": replace(record, target={}),
        "no keys": replace(record, keys=[]),
        "without the recipe": replace(record, variants=record.variants[1:]),
    }
    assert [what for what, one in damaged.items() if summarize(one).fit is not None] == []


@pytest.mark.parametrize(
    ("effect", "low", "high", "text"),
    [
        (-0.01, -0.02, -0.005, "1% more of zh lowers the target by 0.0100 (0.0050 to 0.0200) bits per byte"),
        (0.01, 0.004, 0.03, "1% more of zh raises the target by 0.0100 (0.0040 to 0.0300) bits per byte"),
        (
            0.01,
            -0.01,
            0.03,
            "1% more of zh has no effect beyond the noise: +0.0100 (-0.0100 to +0.0300) bits per byte",
        ),
    ],
)
def test_an_effect_in_words(effect: float, low: float, high: float, text: str) -> None:
    assert effect_text(MixtureSource("zh", 0.5, None, effect, low, high, {})) == text
