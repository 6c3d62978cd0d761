"""Which objects are the same is guarded, however a program asks."""

import operator
import random
import typing

import pytest
import torch
from weft_capture import capture


class Plain:
    pass


OBJECTS = {
    "object": Plain,
    "module": lambda: torch.nn.Linear(1, 1),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "function": lambda: lambda: 0,
    "type variable": lambda: typing.TypeVar("A"),
    "device": lambda: torch.device("cpu"),
    "in a tuple": lambda: (1, Plain()),
}
QUESTIONS = {
    "is": operator.is_,
    "in a list": lambda a, b: any(a is one for one in [b]) or [a].count(b),
    "key": lambda a, b: {a: 1}.get(b),
    "element": lambda a, b: (len({a, b}), a in {b}),
    "equal": operator.eq,
}


@pytest.mark.sampled
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_that_are_one_in_some_calls(kind, question):
    ask, (a, b) = QUESTIONS[question], (OBJECTS[kind](), OBJECTS[kind]())
    if kind == "parameter" and question in ("in a list", "equal"):
        pytest.skip("compares the elements")
    for pairs in ([(a, b), (a, a), (b, a)], [(a, a), (a, b), (b, b)]):

        def program(x, one, other):
            return x + 1, ask(one, other)

        compiled = capture(program, lambda graph, inputs: graph.forward)
        for one, other in pairs:
            made, said = compiled(torch.zeros(1), one, other)
            assert made == 1
            assert said == ask(one, other)


HOLDERS = {
    "keys": lambda one: {one: 1},
    "pairs": lambda one: {(one, 1): 1, (int, one): 2},
    "elements": lambda one: {one},
    "frozen": lambda one: frozenset([one]),
    "items": lambda one: [one],
}
ASKED = {
    "keys": lambda one, held: (one in held, held.get(one), len({**held, one: 2})),
    "pairs": lambda one, held: ((one, 1) in held, held.get((int, one))),
    "elements": lambda one, held: (one in held, len(held | {one}), len({one} & held)),
    "frozen": lambda one, held: (one in held, frozenset([one]) == held),
    "items": lambda one, held: (len({*held} - {one}), dict.fromkeys(held, 1).get(one)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", [*OBJECTS, "exception"])
def test_objects_that_containers_from_outside_hold(kind, holder):
    make = {**OBJECTS, "exception": ValueError}[kind]
    a, b, ask = make(), make(), ASKED[holder]

    def program(x, one, held):
        return x + 1, ask(one, held)

    for order in ((a, b, a), (b, a, b)):
        compiled, held = capture(program, lambda graph, inputs: graph.forward), HOLDERS[holder](a)
        for one in order:
            made, said = compiled(torch.zeros(1), one, held)
            assert made == 1
            assert said == ask(one, held)


def test_which_method_of_a_generator_is_guarded():
    drawn, infinite = random.Random(), float("inf")

    def program(x, draw):
        return x + 1, draw(infinite)

    compiled = capture(program, lambda graph, inputs: graph.forward)
    assert compiled(torch.zeros(1), drawn.expovariate)[1] == 0
    assert compiled(torch.zeros(1), drawn.paretovariate)[1] == 1


def test_a_text_is_loaded_before_the_way_to_it_is_written():
    """Keys and values of writes come from where they were before the first write."""

    def program(x, holder):
        key = holder.names[0]
        holder.names = None
        holder.found[key] = x + 1
        holder.last = key
        return key

    outcomes = []
    for run in (program, capture(program, lambda graph, inputs: graph.forward)):
        holder = Plain()
        holder.names, holder.found = ("".join(["a", "key"]),), {}
        name = holder.names[0]
        assert run(torch.zeros(1), holder) is name
        assert holder.last is name
        outcomes.append((holder.names, [*holder.found], [*holder.found.values()]))
    assert outcomes[0] == outcomes[1]
