"""The plugins by themselves: ``pip install -e . && pytest``. A run with all of them is zero2all's own test."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import torch
from z2a_example.evaluation import CsvSink, sums
from z2a_example.training import Signum

from zero2all.base.plugins import bind
from zero2all.corpus import Document
from zero2all.corpus.filters import Drop, Keep
from zero2all.corpus.readers.base import BrokenRecord, ReadLimits
from zero2all.corpus.readers.streams import PeekableStream
from zero2all.optim.lr_schedule import LRSchedule


def test_the_reader_splits_lines_and_reports_those_without_a_question() -> None:
    stream = PeekableStream(io.BytesIO(b"Who? I\nnobody\n"))
    record, broken = bind("reader", "question-lines")(stream, "a.qa", ReadLimits())
    assert record["text"] == "Who?\nI"
    assert isinstance(broken, BrokenRecord)


def test_the_filter_drops_capitals() -> None:
    shouting = bind("filter", {"name": "shouting", "max_share": 0.6})
    for text, result in (("STOP IT NOW", Drop), ("A quiet day.", Keep)):
        assert isinstance(shouting(Document("", "", "", "", "", text, "", "")), result)


def test_the_schedule_halves() -> None:
    schedule = LRSchedule("halving", 10, 0, 1.0, 0.0, 0.0, options={"times": 2})
    assert [schedule.lr_multiplier(step) for step in (0, 5, 9)] == [1.0, 0.5, 0.25]


def test_the_optimizer_moves_by_its_rate() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, -0.1])
    Signum([{"params": [weight], "lr": 0.5, "weight_decay": 0.0}], beta=0.9).step()
    assert weight.tolist() == [-0.5, 0.5]


def test_reward_benchmark_and_sink(tmp_path: Path) -> None:
    assert bind("reward", {"name": "digits", "points": 2})("", "a1", "") == 1
    assert all(item.options[item.answers[0]] == str(sum(map(int, item.id.split("+")))) for item in sums(tmp_path)[0])
    with closing(CsvSink(tmp_path, digits=1)) as sink:
        sink.step(3, {"loss": 1.25})
    assert (tmp_path / "metrics.csv").read_text().strip() == "3,loss,1.2"
