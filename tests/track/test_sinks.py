"""Each adapter against the real library, offline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from zero2all.base.errors import UsageError, Z2aError
from zero2all.track import RunRecord, open_sinks, read_steps


def write(directory: Path, *sinks: str) -> None:
    opened = open_sinks(sinks, directory)
    with RunRecord(directory / "record.jsonl", sinks=opened, system_every=None) as record:
        record.event("start", step=0)
        for step in range(5):
            record.step(step, **{"loss": 5.0 - step, "loss/zh": 1.0})
        record.sample(5, "zh", "# 床前明月光\n<b>x</b>")
        record.histogram(5, "grad", [1, 3], [0.0, 0.5, 1.0])
        record.event("done", step=5)


def test_tensorboard_reads_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, "tensorboard")
    found: Any = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(point.step, point.value) for point in found.Scalars("loss")] == [(step, 5.0 - step) for step in range(5)]
    assert "loss/zh" in found.Tags()["scalars"]
    [histogram] = found.Histograms("grad")
    assert histogram.histogram_value.num == 4
    [sample] = found.Tensors("samples/zh/text_summary")
    assert "床前明月光" in sample.tensor_proto.string_val[0].decode()
    assert "fails" not in capsys.readouterr().err
    assert len(read_steps(tmp_path / "record.jsonl")) == 5


@pytest.mark.slow
def test_wandb_takes_it_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("zero2all.track.sinks.CLOSE_TIMEOUT", 200.0)  # its service starts slowly under load
    write(tmp_path, "wandb")
    assert "the sink Wandb" not in capsys.readouterr().err
    [file] = tmp_path.rglob("*.wandb")
    wanted = [b"loss/zh", "床前明月光".encode(), b"grad", b"events/done"]
    until = time.monotonic() + 60
    while missing := [word for word in wanted if word not in file.read_bytes()]:  # its service writes behind us
        assert time.monotonic() < until, missing
        time.sleep(0.1)


class RecordingSink:
    """A custom sink, as documented."""

    calls: list[tuple[Any, ...]] = []  # noqa: RUF012 - the test reads it

    def __init__(self, directory: Path) -> None:
        self.calls.clear()

    def step(self, step: int, values: dict[str, float]) -> None:
        self.calls.append(("step", step, values))

    def event(self, name: str, details: dict[str, Any]) -> None:
        self.calls.append(("event", name, details["step"]))

    def sample(self, step: int, name: str, text: str) -> None:
        self.calls.append(("sample", step, name))

    def histogram(self, step: int, name: str, counts: list[float], edges: list[float]) -> None:
        self.calls.append(("histogram", step, name))

    def close(self) -> None:
        self.calls.append(("close",))


def test_a_custom_sink_by_its_name(tmp_path: Path) -> None:
    write(tmp_path, "tests.track.test_sinks:RecordingSink")
    assert [call[0] for call in RecordingSink.calls] == [
        "event",
        *["step"] * 5,
        "sample",
        "histogram",
        "event",
        "close",
    ]
    assert RecordingSink.calls[1] == ("step", 0, {"loss": 5.0, "loss/zh": 1.0})


def test_a_sink_that_is_not_there_is_named_before_training() -> None:
    with pytest.raises(UsageError, match="did you mean 'tensorboard'"):
        open_sinks(["tensorbord"], Path())
    with pytest.raises(Z2aError, match="cannot be loaded"):
        open_sinks(["no.such:Sink"], Path())


class NoMethods:
    def __init__(self, directory: Path) -> None: ...


class Broken(RecordingSink):
    def __init__(self, directory: Path) -> None:
        raise RuntimeError("no server")


called: list[Path] = []


def a_function(directory: Path) -> RecordingSink:
    called.append(directory)
    return RecordingSink(directory)


HERE = "tests.track.test_sinks"
NOT_SINKS = [
    ("os:system", "is not a class"),
    (f"{HERE}:a_function", "is not a class"),
    ("subprocess:Popen", "no method step, event, sample, histogram, close"),
    (f"{HERE}:NoMethods", "no method step"),
    ("zero2all.track.sinks:Sink", "abstract"),
    (":Sink", "cannot be loaded"),
    (".x:Sink", "cannot be loaded"),
    ("os:", "cannot be loaded"),
]


@pytest.mark.parametrize(("name", "message"), NOT_SINKS)
def test_what_is_not_a_sink_class_is_refused_and_never_called(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.system", lambda command: called.append(command))
    called.clear()
    with pytest.raises(Z2aError, match=message) as caught:
        open_sinks([name], tmp_path)
    assert caught.value.exit_code == 2
    assert not called


def test_recipe_check_validates_sinks_without_creating_one(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from zero2all.cli.main import app

    def check(*sinks: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["recipe", "check", str(recipe), f"track.sinks=[{', '.join(sinks)}]"])
        return done.exit_code, done.output

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("train: {steps: 1}\n")
    status, output = check("'os:system'", "tensorboard", f"'{HERE}:NoMethods'")
    assert status == 2
    assert "track.sinks.0: os:system is not a class" in output
    assert "track.sinks.2" in output
    RecordingSink.calls[:] = [("untouched",)]
    assert check(f"'{HERE}:RecordingSink'")[0] == 0
    assert RecordingSink.calls == [("untouched",)], "the class was instantiated"


def test_a_sink_that_fails_to_start_is_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(Z2aError, match=rf"{HERE}:Broken.*RuntimeError: no server"):
        open_sinks([f"{HERE}:Broken"], tmp_path)
