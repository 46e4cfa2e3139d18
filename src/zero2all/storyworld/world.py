"""The state of a story's world: who is where, holds what and feels what. Events change it, and may contradict it.

The generator applies the events of a story to a world before it writes their sentences; the checker applies the events
that it reads in a text. Both use this class, so a story is consistent exactly if it could have been generated.
Whatever has not been said is unknown (None) and contradicts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

INTRODUCTIONS = ("meet", "own", "see", "want")  # the events that introduce their last argument
TIMES = ("morning", "noon", "afternoon", "evening", "night")


class ProblemKind(StrEnum):
    """What a contradiction is about."""

    NAME = "name"
    FEELING = "feeling"
    THING = "thing"
    PLACE = "place"
    TRAIT = "trait"
    COUNT = "count"
    TIME = "time"


class Problem(NamedTuple):
    """A contradiction between a sentence and what was said before it."""

    kind: ProblemKind
    message: str


class StoryEvent(NamedTuple):
    """What a sentence says happens: `give`, `("Mia", "Tom", "red kite")`."""

    name: str
    args: tuple[str, ...]


@dataclass
class Person:
    """What is known about a character."""

    place: str | None = None
    trait: str | None = None
    sad: bool | None = None


@dataclass
class Thing:
    """What is known about an object."""

    holder: str | None = None
    lying: bool = False  # nobody holds it: it was seen, put down or lost
    place: str | None = None  # where it lies
    wanted: bool = False  # somebody wishes for it; nobody has it yet
    broken: bool = False


@dataclass
class Count:
    """How many items somebody has; `derived` if it follows from a gain or a loss and has not been stated since."""

    number: int
    derived: bool = False


@dataclass
class World:
    """The state after some sentences. `apply` changes it and returns the contradictions."""

    people: dict[str, Person] = field(default_factory=dict)
    things: dict[str, Thing] = field(default_factory=dict)
    counts: dict[tuple[str, str], Count] = field(default_factory=dict)
    time: str | None = None
    rain: bool = False
    question: int | None = None
    sums: int = 0
    right_sums: int = 0
    problems: list[Problem] = field(default_factory=list)

    def apply(self, events: Iterable[StoryEvent], people: Iterable[str], things: Iterable[str]) -> list[Problem]:
        """Apply the events of one sentence that mentions these people and things."""
        self.problems = []
        introduced = {event.args[-1] for event in events if event.name in INTRODUCTIONS}
        for name in people:
            if name not in self.people and name not in introduced:
                self._problem(ProblemKind.NAME, f"{name} was not introduced")
                self.people[name] = Person()
        for thing in things:
            if thing not in self.things and thing not in introduced:
                self._problem(ProblemKind.THING, f"{thing} was not introduced")
                self.things[thing] = Thing()
        for event in events:
            EVENTS[event.name](self, *event.args)
        return self.problems

    def forget(self, people: Iterable[str], things: Iterable[str]) -> None:
        """Something unreadable was said about these people and things: their places and holders are unknown now."""
        for name in people:
            if name in self.people:
                self.people[name] = Person(trait=self.people[name].trait)
            for count in [key for key in self.counts if key[0] == name]:
                del self.counts[count]
        for thing in things:
            self.things[thing] = Thing()

    def _problem(self, kind: ProblemKind, message: str) -> None:
        self.problems.append(Problem(kind, message))

    # People and places.

    def meet(self, person: str) -> None:
        if person in self.people:
            self._problem(ProblemKind.NAME, f"{person} is introduced twice")
        self.people.setdefault(person, Person())

    def at(self, person: str, place: str) -> None:
        if self.people[person].place not in (None, place):
            self._problem(ProblemKind.PLACE, f"{person} is at {self.people[person].place}, not at {place}")
        self.people[person].place = place

    def go(self, person: str, place: str) -> None:
        if self.people[person].place == place:
            self._problem(ProblemKind.PLACE, f"{person} goes to {place}, but is there already")
        self.people[person].place = place

    def home(self, person: str) -> None:
        self.people[person].place = f"the home of {person}"

    def leave(self, person: str) -> None:
        self.people[person].place = None

    def come(self, person: str, host: str) -> None:
        self.people[person].place = self.people[host].place

    def together(self, person: str, other: str) -> None:
        first, second = self.people[person], self.people[other]
        if first.place and second.place and first.place != second.place:
            message = f"{person} is at {first.place}, but {other} is at {second.place}"
            self._problem(ProblemKind.PLACE, message)
        first.place = second.place = second.place or first.place

    # Things.

    def own(self, person: str, thing: str) -> None:
        self._new(thing)
        self.things[thing] = Thing(holder=person)

    def see(self, person: str, thing: str) -> None:
        self._new(thing)
        self.things[thing] = Thing(lying=True, place=self.people[person].place)

    def want(self, person: str, thing: str) -> None:
        self._new(thing)
        self.things[thing] = Thing(wanted=True)

    def _new(self, thing: str) -> None:
        if thing in self.things and not self.things[thing].wanted:
            self._problem(ProblemKind.THING, f"{thing} is introduced twice")

    def hold(self, person: str, thing: str) -> None:
        state = self.things[thing]
        if state.lying or state.wanted or state.holder not in (None, person):
            self._problem(ProblemKind.THING, f"{person} does not have {thing}")
        self.things[thing] = Thing(holder=person, broken=state.broken)

    def lack(self, person: str, thing: str) -> None:
        if self.things[thing].holder == person:
            self._problem(ProblemKind.THING, f"{person} has {thing}")

    def give(self, person: str, other: str, thing: str) -> None:
        self.hold(person, thing)
        self.together(person, other)
        self.things[thing].holder = other

    def lose(self, person: str, thing: str) -> None:
        self.hold(person, thing)
        self.things[thing] = Thing(lying=True, broken=self.things[thing].broken)
        self.sad(person)

    def put(self, person: str, thing: str) -> None:
        self.hold(person, thing)
        self.things[thing] = Thing(lying=True, place=self.people[person].place, broken=self.things[thing].broken)

    def take(self, person: str, thing: str) -> None:
        """Somebody picks up, or finds again, a thing that nobody holds."""
        state, place = self.things[thing], self.people[person].place
        if state.holder is not None:
            self._problem(ProblemKind.THING, f"{person} takes {thing}, but {state.holder} has it")
        elif state.place and place and state.place != place:
            self._problem(ProblemKind.PLACE, f"{thing} is at {state.place}, but {person} is at {place}")
        self.things[thing] = Thing(holder=person, broken=state.broken)

    def damage(self, thing: str) -> None:
        if self.things[thing].broken:
            self._problem(ProblemKind.THING, f"{thing} is broken already")
        self.things[thing].broken = True

    def repair(self, thing: str) -> None:
        self.things[thing].broken = False

    def use(self, person: str, thing: str) -> None:
        self.hold(person, thing)
        if self.things[thing].broken:
            self._problem(ProblemKind.THING, f"{thing} is broken")

    # Feelings and traits.

    def sad(self, person: str) -> None:
        self.people[person].sad = True

    def upset(self, person: str) -> None:
        """Others see that somebody is sad."""
        if self.people[person].sad is False:
            self._problem(ProblemKind.FEELING, f"{person} is not sad")
        self.people[person].sad = True

    def glad(self, person: str) -> None:
        self.people[person].sad = False

    def trait(self, person: str, trait: str) -> None:
        if self.people[person].trait not in (None, trait):
            self._problem(ProblemKind.TRAIT, f"{person} is {self.people[person].trait}, not {trait}")
        self.people[person].trait = trait

    def change(self, person: str, trait: str) -> None:
        self.people[person].trait = trait

    # Numbers.

    def count(self, person: str, item: str, number: str) -> None:
        known = self.counts.get((person, item))
        if known and known.derived:
            self._sum(right=known.number == int(number))
        elif known and known.number != int(number):
            self._problem(ProblemKind.COUNT, f"{person} has {known.number} {item}, not {number}")
        self.counts[person, item] = Count(int(number))

    def gain(self, person: str, item: str, number: str) -> None:
        if known := self.counts.get((person, item)):
            self.counts[person, item] = Count(known.number + int(number), derived=True)

    def spend(self, person: str, item: str, number: str) -> None:
        if known := self.counts.get((person, item)):
            if known.number < int(number):
                self._problem(ProblemKind.COUNT, f"{person} has only {known.number} {item}, not {number}")
            self.counts[person, item] = Count(max(0, known.number - int(number)), derived=True)

    def add(self, first: str, second: str, total: str) -> None:
        self._sum(right=int(first) + int(second) == int(total))

    def ask(self, first: str, second: str) -> None:
        self.question = int(first) + int(second)

    def subtract(self, first: str, second: str) -> None:
        self.question = int(first) - int(second)

    def answer(self, number: str) -> None:
        if self.question is not None:
            self._sum(right=int(number) == self.question)

    def _sum(self, *, right: bool) -> None:
        self.sums += 1
        self.right_sums += right

    # Time and weather.

    def clock(self, time: str) -> None:
        if self.time and TIMES.index(time) < TIMES.index(self.time):
            self._problem(ProblemKind.TIME, f"it is {self.time} already, not {time}")
        self.time = time

    def tomorrow(self) -> None:
        self.time = None

    def wet(self) -> None:
        self.rain = True

    def dry(self) -> None:
        if not self.rain:
            self._problem(ProblemKind.TIME, "it was not raining")
        self.rain = False


EVENTS: dict[str, Callable[..., None]] = {
    "meet": World.meet, "at": World.at, "go": World.go, "home": World.home, "leave": World.leave, "come": World.come,
    "with": World.together,
    "own": World.own, "see": World.see, "want": World.want, "hold": World.hold, "lack": World.lack, "give": World.give,
    "lose": World.lose, "put": World.put, "take": World.take, "break": World.damage, "repair": World.repair,
    "use": World.use,
    "sad": World.sad, "upset": World.upset, "glad": World.glad, "is": World.trait, "become": World.change,
    "count": World.count, "gain": World.gain, "spend": World.spend, "sum": World.add, "ask": World.ask,
    "subtract": World.subtract, "answer": World.answer,
    "time": World.clock, "tomorrow": World.tomorrow, "rain": World.wet, "dry": World.dry,
}  # fmt: skip


class Discourse:
    """Whom a pronoun means: `he` is the first person of the sentence before, `they` the last two named together.

    After a sentence about two people, such as "Mia and Tom laughed", nobody is meant by `he` or `she`.
    """

    def __init__(self) -> None:
        self.topic: str | None = None
        self.pair: tuple[str, str] | None = None
        self.people: tuple[str, ...] = ()

    def mention(self, people: tuple[str, ...], *, joint: bool) -> None:
        """A sentence has mentioned these people, in this order; `joint` if it is about two of them."""
        if people:
            self.topic, self.people = None if joint else people[0], people
        if len(people) >= 2:
            self.pair = people[0], people[1]
