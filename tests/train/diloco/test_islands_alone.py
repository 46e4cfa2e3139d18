"""The exchanges of one island, with a link that answers what the test says: failures, and what must leave no trace."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.train.diloco.test_outer_optimizer import TinyModel, flat, train_a_little
from zero2all.base.errors import Z2aError
from zero2all.checkpoint.training_state import IslandsState
from zero2all.cluster.launch.islands.messages import StartAnswer
from zero2all.recipe.sync import SyncRecipe
from zero2all.train.diloco import islands as islands_module
from zero2all.train.diloco.islands import FRAGMENT_NUMBERS, Islands
from zero2all.train.diloco.link import CompletedExchange, Missed
from zero2all.train.diloco.outer_optimizer import OuterOptimizer

TOTAL = 24


class OwnLink:
    """An island without others: each exchange has its own part, unless ``answers`` says something else."""

    def __init__(self) -> None:
        self.answers: dict[int, Missed | Exception] = {}
        self.numbers: list[int] = []
        self.priorities: list[int] = []
        self.start_answer = StartAnswer(-1, present=[0])
        self.step_of_provider = 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def start(self, exchange: int, digest: str) -> StartAnswer:
        return self.start_answer

    def exchange(self, number: int, last: int, part: Tensor) -> CompletedExchange | Missed:
        self.numbers.append(number)
        self.priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        assert self.may_answer.wait(10)
        answer = self.answers.get(number)
        if isinstance(answer, Exception):
            raise answer
        return answer or CompletedExchange([part], [0], 0, False)

    def publish_state(self, exchange: int, step: int, tensors: Sequence[Tensor]) -> None: ...

    def fetch_state(self, answer: StartAnswer, tensors: Sequence[Tensor]) -> int | None:
        for number, tensor in enumerate(tensors):
            tensor.fill_(number + 1)
        return self.step_of_provider

    def gather(self, own: str, summarize: Callable[[list[str]], str]) -> str:
        return summarize([own])

    def close(self, *, is_done: bool) -> None: ...


def island(link: OwnLink, **options: object) -> tuple[TinyModel, Islands]:
    model = TinyModel(0)
    recipe = SyncRecipe(islands=2, **{"every": 4, "fragments": 2, "overlap": 2, **options})
    return model, Islands(OuterOptimizer(model, 3, recipe), link, TOTAL)


def trained(model: TinyModel, islands: Islands, steps: range, complete_at: int = 0) -> None:
    for step in steps:
        train_a_little(model, step, size=0.01)
        islands.after_update(step + 1, complete=step + 1 == complete_at)


def copies(islands: Islands) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in islands.outer.state_tensors().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_exchange_that_fails_with_a_timeout_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(islands_module, "WAIT_INTERVAL", 0.01)
    link = OwnLink()
    link.answers[4 * FRAGMENT_NUMBERS] = TimeoutError("of a socket")
    model, islands = island(link, fragments=1, overlap=0)
    islands._on_wait = lambda: pytest.fail("it has an answer")
    with pytest.raises(TimeoutError, match="of a socket"):
        trained(model, islands, range(4))


def test_an_exchange_is_as_urgent_as_training() -> None:
    link = OwnLink()
    model, islands = island(link)
    trained(model, islands, range(8))
    assert {*link.priorities} == {os.getpriority(os.PRIO_PROCESS, os.getpid())}


def test_who_waits_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(islands_module, "WAIT_INTERVAL", 0.01)
    link, signs = OwnLink(), list[int]()
    model, islands = island(link, fragments=1, overlap=0)

    def wait() -> None:
        signs.append(1)
        if len(signs) == 3:
            link.may_answer.set()

    link.may_answer.clear()
    islands._on_wait = wait
    trained(model, islands, range(4))
    assert len(signs) >= 3


@pytest.mark.parametrize("overlap", [0, 2])
def test_an_exchange_that_is_given_up_leaves_no_trace(overlap: int) -> None:
    """Its weights at the beginning were once left behind, and added to the weights after the next resume."""
    link = OwnLink()
    link.answers[12 * FRAGMENT_NUMBERS + 1] = "given up"
    model, islands = island(link, every=8, overlap=overlap)
    trained(model, islands, range(11))  # both fragments were exchanged and merged, at steps 4 and 8
    before = copies(islands)
    assert any(tensor.any() for name, tensor in before.items() if name.startswith("residual"))
    trained(model, islands, range(11, 12), complete_at=12)
    assert islands.state() == IslandsState(8 * FRAGMENT_NUMBERS, None)
    assert same(copies(islands), before)


def test_an_exchange_in_flight_is_merged_before_the_next_begins_whatever_the_recipe_is_now() -> None:
    link = OwnLink()
    model, islands = island(link, every=12)
    trained(model, islands, range(6), complete_at=6)  # fragment 1, to be merged at step 8
    state, tensors = islands.state(), copies(islands)
    assert state == IslandsState(6 * FRAGMENT_NUMBERS + 1, 8)
    other_model, resumed = island(link, every=7, fragments=1)  # due at step 7
    other_model.load_state_dict(model.state_dict())
    for name, tensor in resumed.outer.state_tensors().items():
        tensor.copy_(tensors[name])
    resumed.restore(state)
    weights, pending = flat(other_model).clone(), flat_pending(resumed)
    assert pending.any()
    resumed.after_update(7)
    assert torch.allclose(flat(other_model), weights + pending, atol=1e-6)
    assert resumed.state().merge_at == 9


def flat_pending(islands: Islands) -> Tensor:
    [fragment] = islands.outer.fragments
    assert fragment.pending is not None
    views = fragment.views(fragment.pending.clone())
    return torch.cat([views[name].flatten() for name in fragment.weights])


def test_after_the_last_step_every_fragment_is_exchanged_once() -> None:
    link = OwnLink()
    model, islands = island(link)
    trained(model, islands, range(TOTAL))
    assert link.numbers[-2:] == [TOTAL * FRAGMENT_NUMBERS, TOTAL * FRAGMENT_NUMBERS + 1]
    for fragment in islands.outer.fragments:
        assert torch.equal(fragment.read_weights(), fragment.outer)
    assert islands.start(TOTAL) == TOTAL
    assert len(link.numbers) == len(set(link.numbers)), "nothing is left to exchange"


@pytest.mark.parametrize("steps", [-1, TOTAL + 1])
def test_a_state_of_impossible_steps_is_refused(steps: int) -> None:
    link = OwnLink()
    link.start_answer, link.step_of_provider = StartAnswer(4, 1, [("127.0.0.1", 1)]), steps
    _, islands = island(link)
    with pytest.raises(Z2aError, match=f"island 1 says that it has trained {steps} steps"):
        islands.start(0)


def test_an_island_that_joins_takes_over_weights_and_momentum_and_forgets_its_own() -> None:
    """It would hide that it did not: the next exchanges bring it to the others' weights, with a jump for all."""
    link = OwnLink()
    model, islands = island(link)
    trained(model, islands, range(9), complete_at=9)  # with residuals, and an outstanding exchange
    link.start_answer, link.step_of_provider = StartAnswer(7, 1, [("127.0.0.1", 1)], present=[0, 1]), 12
    assert islands.start(9) == 12
    assert islands.state() == IslandsState(7, None)
    for number, fragment in enumerate(islands.outer.fragments):
        assert (fragment.outer == 2 * number + 1).all()
        assert (fragment.momentum == 2 * number + 2).all()
        assert torch.equal(fragment.read_weights(), fragment.outer)
        assert fragment.residual is not None
        assert fragment.pending is not None
        assert not fragment.residual.any()
        assert not fragment.pending.any()
