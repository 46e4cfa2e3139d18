from __future__ import annotations

import pytest

from tests.experiments.helpers import Training
from zero2all.experiments import runner


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    training = Training()
    monkeypatch.setattr(runner, "start_variant", training.start)
    monkeypatch.setattr(runner, "_read_result", training.result)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    monkeypatch.setattr("zero2all.experiments.stages.build_missing_stages", lambda recipe, target: None)
    monkeypatch.setattr(runner, "choose_batch", lambda recipe: recipe)
    return training
