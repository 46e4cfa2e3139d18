from __future__ import annotations

import os
import signal

import pytest

from zero2all.base import tasks as engine
from zero2all.base.errors import Z2aError
from zero2all.base.tasks import TaskEngine, shutdown_workers


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def die(number: int) -> int:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail(number: int) -> int:
    if number == 2:
        raise Z2aError("task 2 is wrong")
    return number


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_in_task_order_and_each_completion_is_reported(workers: int) -> None:
    told: list[int] = []
    results = TaskEngine(workers=workers).run(square, [(n,) for n in range(7)], told.append)
    assert [value for value, _ in results] == [n * n for n in range(7)]
    assert sorted(told) == list(range(7))
    assert ({pid for _, pid in results} == {os.getpid()}) == (workers == 1)


def test_without_semaphores_one_process_does_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_semaphores(*args: object, **options: object) -> None:
        raise FileNotFoundError("no semaphores")

    shutdown_workers()
    monkeypatch.setattr(engine, "ProcessPoolExecutor", no_semaphores)
    for _ in range(2):
        assert TaskEngine(workers=2).run(square, [(n,) for n in range(3)]) == [(n * n, os.getpid()) for n in range(3)]
    assert capsys.readouterr().err.count("no worker processes: no semaphores") == 1


def test_a_killed_worker_is_an_actionable_error() -> None:
    with pytest.raises(Z2aError, match="memory ran out"):
        TaskEngine(workers=2).run(die, [(n,) for n in range(4)])


@pytest.mark.parametrize("workers", [1, 2])
def test_the_error_of_a_task_is_not_swallowed(workers: int) -> None:
    with pytest.raises(Z2aError, match="task 2 is wrong"):
        TaskEngine(workers=workers).run(fail, [(n,) for n in range(4)])
