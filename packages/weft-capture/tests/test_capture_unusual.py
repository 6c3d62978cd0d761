"""Small programs that do unusual things: each gives in eager and captured the same trace."""

import abc
import collections
import functools
import itertools
import operator
import weakref

import pytest
import torch
import torch.utils.checkpoint
import weft_capture
from capture_check import eager_backend

PROGRAMS = {}
X = torch.arange(3.0)


def program(function):
    """Add a program: (capture) -> trace; `capture` is applied to what is to be captured."""
    PROGRAMS[function.__name__] = function
    return function


@pytest.mark.sampled
@pytest.mark.parametrize("name", PROGRAMS)
def test_same_trace(name):
    def captured(function):
        return weft_capture.capture(function, eager_backend)

    assert repr(PROGRAMS[name](captured)) == repr(PROGRAMS[name](lambda function: function))


def test_names_collected():
    assert len(PROGRAMS) > 20


# ---- sets


@program
def order_of_sets_from_outside(capture):
    @capture
    def run(x, items):
        for item in items:
            x = x * 2 + item
        return x.tolist()

    grown = set()
    for item in (16, 8, 0):
        grown.add(item)
    return [run(X, items) for items in ({0, 8}, {8, 0}, grown, {0, 8, 16}, set(range(40)) & {0, 8})]


@program
def order_of_sets_made_inside(capture):
    @capture
    def run(x, count):
        one = {8 * n for n in range(count)}
        two = {0, 8, 16, 24, 3, 11}
        made = [one | two, one & two, two - one, one ^ two, set(one), frozenset(two), {*two}]
        return [*made, *map(list, made), (x + 1).tolist()]

    return [run(X, count) for count in (0, 1, 3, 5, 9)]


@program
def a_set_from_outside_changes(capture):
    @capture
    def run(x, items):
        items.add(24)
        before = list(items)
        items.discard(0)
        items |= {40, 32}
        items.update([5, 13])
        return (x + len(items)).tolist(), before, items.pop()

    shrunk = set(range(0, 80, 8))
    shrunk -= set(range(24, 80, 8))
    sets = [{0, 8, 16}, shrunk, {0, 8, 16}]
    return [run(X, items) for items in sets], [list(items) for items in sets]


@program
def sets_and_views(capture):
    @capture
    def run(x, one, other):
        items = same = {8}
        items |= one.keys()
        try:
            same |= one.values()
        except TypeError as error:
            text = str(error)
        equal = one.values() == one.values(), {1: [1]}.items() == {1: [1]}.items()
        made = one.keys() & other.keys(), one.keys() ^ [1], one.items() - other.items()
        return items is same, items, same, text, equal, made, (x + 1).tolist()

    return run(X, {0: 1, 8: 2, 16: 3}, {16: 3, 8: 1, 24: 0})


# ---- what gives items, one by one


def _failing(x):
    yield x
    yield x + 1
    raise ValueError


@program
def what_raises_in_between(capture):
    @capture
    def run(x, items, table, members, queue):
        for fill in (
            lambda: items.extend(_failing(1)),
            lambda: table.update((n, n) for n in _failing(1)),
            lambda: members.update(_failing(1)),
            lambda: queue.extendleft(_failing(1)),
            lambda: operator.iadd(items, _failing(5)),
            lambda: items.sort(key=lambda n: n if n < 6 else str(n)),
        ):
            try:
                fill()
            except (ValueError, TypeError) as error:
                items.append(len(type(error).__name__))
        return (x + len(items)).tolist()

    state = [9, 8, 1], {}, set(), collections.deque(maxlen=3)
    return [run(X, *state), run(X, *state), state]


@program
def a_list_grows_while_it_is_extended(capture):
    @capture
    def run(x):
        items = []
        items.extend(len(items) for _ in range(3))
        items += (len(items) for _ in range(2))
        return items, (x + 1).tolist()

    return run(X)


@program
def no_more_is_taken_than_asked_for(capture):
    taken = []

    class Endless:
        def __iter__(self):
            for number in itertools.count():
                taken.append(number)
                yield number

    @capture
    def run(x):
        items = iter(Endless())
        found = 3 in items
        try:
            one, two = Endless()
        except ValueError as error:
            taken.append(str(error))
        pairs = itertools.pairwise(Endless())
        chained = itertools.chain.from_iterable([n, n] for n in items)
        late = itertools.chain([5], Endless())
        return found, next(items), next(pairs), next(pairs), next(chained), next(late), x.tolist()

    return run(X), run(X), taken


@program
def a_key_is_called_in_between(capture):
    log = []

    def numbers():
        for number in (1, 3, 2):
            log.append(number)
            yield number

    @capture
    def run(x):
        return (x + max(numbers(), key=lambda n: log.append(-n) or n)).tolist()

    return run(X), run(X), log


# ---- generators and finalizers


@program
def a_generator_dies_in_a_try_block(capture):
    log = []

    def numbers():
        try:
            yield 1
            yield 2
        finally:
            log.append("end")

    @capture
    def loop(x):
        for number in numbers():
            break
        log.append("after the loop")
        return x + number

    @capture
    def release(x):
        items = numbers()
        next(items)
        del items
        log.append("after del")
        return x + 1

    return [run(X).tolist() for run in (loop, release, loop, release)], log


@program
def an_object_dies_at_once(capture):
    log = []

    class Ends:
        def __del__(self):
            log.append("end")

    @capture
    def run(x):
        Ends()
        log.append("after")
        kept = Ends()
        log.append("before the end")
        return x + (kept is None)

    return run(X).tolist(), run(X).tolist(), log


@program
def a_tensor_that_was_rebound_is_dead(capture):
    @capture
    def run(x):
        made = x + 1
        reference = weakref.ref(made)
        weft_capture.graph_break()
        alive = reference() is made
        made = made * 2
        weft_capture.graph_break()
        return alive, reference() is None, made.tolist()

    return run(X), run(X)


# ---- classes


@program
def descriptors_and_metaclasses(capture):
    log = []

    class Tells:
        def __get__(self, owner, cls):
            log.append((owner is None, cls.__name__))
            return 2.0

        def __set__(self, owner, value):
            log.append(value)

    class Meta(type):
        of_meta = Tells()

        def __getattr__(cls, name):
            log.append(name)
            return 3.0

        @property
        def size(cls):
            log.append("size")
            return 4.0

    class Base(metaclass=Meta):
        tells = Tells()

        @classmethod
        def above(cls):
            return cls.tells

    class Derived(Base):
        tells = 5.0

        @classmethod
        def above(cls):
            return super().tells + super().above()

    @capture
    def run(x):
        base = Base()
        base.tells = 7
        return (x * base.tells + Base.tells * Base.missing + Base.size + Base.of_meta).tolist(), (
            Derived.above()
        )

    return run(X), run(X), log


@program
def a_class_is_registered_later(capture):
    class Kind(abc.ABC):
        pass

    class One:
        pass

    class Hooked(abc.ABC):
        answer = False

        @classmethod
        def __subclasshook__(cls, other):
            return cls.answer

    class Two:
        pass

    @capture
    def run(x, one):
        return (x + isinstance(one, Kind) + 2 * isinstance(one, Hooked)).tolist()

    trace = [run(X, One())]
    Kind.register(One)
    trace.append(run(X, One()))
    Hooked.answer = True
    return [*trace, run(X, Two())]


@program
def special_methods_of_the_instance_do_not_count(capture):
    class One:
        def __len__(self):
            return 3

        def __iter__(self):
            return iter([1])

        def __contains__(self, item):
            return True

    @capture
    def run(x, one):
        one.__len__ = lambda: 9
        one.__iter__ = lambda: iter([2])
        one.__contains__ = lambda item: False
        return len(one), list(one), 5 in one, bool(one), one.__len__(), (x + 1).tolist()

    return run(X, One()), run(X, One())


@program
def special_methods_that_give_anything(capture):
    class Gives:
        def __init__(self, given):
            self.given = given

        def __len__(self):
            return self.given

    class Says(Gives):
        def __bool__(self):
            return self.given

    def run(x, kind, ask, given):
        return ask(kind(given)), (x + 1).tolist()

    def text(*args):
        try:
            return capture(run)(X, *args)
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    given = (True, 2, -1, -2, "a", None)
    asked = itertools.product((Gives, Says), (len, bool, list), given)
    return [text(*args) for args in asked if not (args[1] is list and given)]


@program
def hints_of_lengths(capture):
    class Hints:
        def __init__(self, hint):
            self.hint = hint

        def __iter__(self):
            return iter([1, 2])

        def __length_hint__(self):
            if self.hint == "raise":
                raise TypeError("no hint")
            return self.hint

    @capture
    def run(x, hint):
        return list(Hints(hint)), (x + 1).tolist()

    def text(hint):
        try:
            return run(X, hint)
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    return [text(hint) for hint in (1, -1, "a", 1.5, NotImplemented, "raise")]


@program
def arguments_of_object(capture):
    class Plain:
        pass

    class Own:
        def __init__(self, *args):
            super().__init__(*args)

    @capture
    def run(x, make):
        text = ""
        try:
            make()
        except TypeError as error:
            text = str(error)
        return text, (x + 1).tolist()

    calls = (
        lambda: Plain().__init__(42),
        lambda: object.__init__(Plain(), 42),
        lambda: Plain(42),
        lambda: Own(42),
        lambda: object.__init__(Own(), 42),
    )
    return [run(X, make) for make in calls]


@program
def attributes_of_a_wrapped_function(capture):
    @capture
    def run(x):
        def function(x: int):
            return x

        wrapper = classmethod(function)
        names = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")
        same = [getattr(wrapper, name) is getattr(function, name) for name in names]
        same.append(hasattr(wrapper, "__type_params__"))
        return same, wrapper.__func__ is function, (x + 1).tolist()

    return run(X)


class _Around:
    def run(self, capture):
        @capture
        def inner(x):
            class Changes:
                nonlocal __class__
                __class__ = 42

                def method(self):
                    return __class__

            return __class__, (x + 1).tolist()

        return inner(X)

    def close(self):
        return __class__


@program
def a_nonlocal_class(capture):
    return _Around().run(capture)


# ---- names


@program
def two_ways_to_one_variable(capture):
    class One:
        pass

    @capture
    def run(x, one, table):
        table["a"] = x + 1
        one.b = x + 2
        return (one.a * 2).tolist(), table["b"] * 3, table.get("c")

    @capture
    def reads(x, one, table):
        one.a = x + 2
        return (table["a"] * 3 + x).tolist()

    one, other = One(), One()
    one.a = other.a = 0
    trace = [run(X, one, vars(one)), reads(X, one, {"a": 1}), reads(X, other, vars(other))]
    other.b = 5
    return [*trace, run(X, other, {"b": 5})[1:]]


@program
def two_ways_to_one_global(capture):
    names = {"G": 1.0}
    text = """
def run(x, change):
    before = x * G
    change()
    return (before + G).tolist()
def write(x, names):
    names["G"] = 7.0
    return (x * G).tolist()
"""
    exec(text, names)
    run, write = capture(names["run"]), capture(names["write"])

    def change():
        names["G"] += 1

    trace = [run(X, change), run(X, change), run(X, lambda: None)]
    return [*trace, write(X, names), write(X, {}), names["G"]]


@program
def a_cache_is_cleared(capture):
    log = []

    @functools.lru_cache(maxsize=2)
    def double(number):
        log.append(number)
        return number * 2

    @capture
    def run(x, number):
        return (x + double(number) + double(number + 1)).tolist()

    trace = [run(X, 1), run(X, 1), run(X, 5)]
    double.cache_clear()
    return [*trace, run(X, 1), log]


@program
def cache_that_knows_what_an_object_was(capture):
    class Plan:
        factor = 2

        @functools.lru_cache  # noqa: B019
        def scaled(self, number):
            return self.factor * number

    @capture
    def run(x, number):
        return (x + plan.scaled(number)).tolist(), plan.scaled.cache_info()

    plan = Plan()
    trace = [run(X, 3)]
    plan.factor = 5
    return [*trace, run(X, 4), run(X, 3)]


@program
def extreme_of_numbers_of_unlike_types(capture):
    @capture
    def run(x, few, rate):
        return min(few, rate), max(few, rate), max(few, 2), min(True, few), x * min(rate, few)

    return [run(X, few, few + shift).__repr__() for few, shift in ((1, 0.5), (4, 0.5), (7, -0.5))]


@program
def checkpoint_that_counts(capture):
    log, layer = [], torch.nn.Linear(3, 1, bias=False)

    def inner(x):
        log.append(x.requires_grad)
        return layer(x).exp()

    @capture
    def run(x):
        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False).sum()

    with torch.no_grad():
        run(layer.weight.fill_(0.5))
    run(X).backward()
    run(X).backward()
    return log, layer.weight.grad.tolist()


@program
def checkpoint_that_reads_what_is_written_later(capture):
    @capture
    def run(x):
        scale = x.mean()
        y = torch.utils.checkpoint.checkpoint(lambda t: t * scale, x, use_reentrant=False)
        scale.zero_()
        return y.sum()

    x = X.clone().requires_grad_()
    run(x).backward()
    return x.grad.tolist()


@program
def a_cache_gives_objects(capture):
    class Plan:
        def __init__(self, sizes):
            self.sizes = list(sizes)

    @functools.lru_cache(maxsize=3)
    def plan(name, sizes):
        made = Plan(sizes) if name == "object" else [sizes[0] * 2, sizes[1]]
        return made if name == "object" else (made, {0: sizes[0]}, None)

    @capture
    def run(x):
        (shape, count, none), kept = plan("list", x.shape), plan("object", (2, 1))
        return (x.repeat(2, 1).reshape(shape) + count[0]).tolist(), none, kept, kept.sizes[0] * x

    @capture
    def grow(x):
        shape, *_ = plan("list", x.shape)
        shape.append(1)
        return x + len(shape), shape

    trace = []
    for rows in (2, 3, 4, 4, 2, 2):
        x = torch.ones(rows, 3)
        *numbers, kept, scaled = run(x)
        again = grow(x)
        trace += [*numbers, kept is plan("object", (2, 1)), scaled.tolist(), again[0].tolist()]
        trace += [again[1] is plan("list", x.shape)[0], plan.cache_info().misses]
        again[1].pop()
        kept.sizes[0] += 1
    return trace


@program
def ranges_that_are_equal(capture):
    @capture
    def run(x, numbers):
        return (x + numbers.start + 2 * numbers.stop).tolist()

    return [run(X, numbers) for numbers in (range(0), range(5, 5), range(0, 3, 2), range(0, 4, 2))]


@program
def iterators_of_a_deque_that_changes(capture):
    @capture
    def overwrite(x, queue):
        queue[0] = 7
        queue[-1] = 3
        return x + 1

    @capture
    def move(x, queue):
        queue.append(4)
        queue.pop()
        return x + 1

    trace = []
    for change in (overwrite, move):
        queue = collections.deque([1, 2, 3])
        items = iter(queue)
        trace += [next(items), change(X, queue).tolist()]
        try:
            trace.append(list(items))
        except RuntimeError as error:
            trace.append(str(error))
    return trace


_OBJECTS = [torch.nn.Identity() for _ in range(9)]
_WRONG = """
len()|max()|next(iter([1]), 2, 3)|dir(1, 2)|getattr([], 1)|abs([1])|float(1, 2)|[1] * None|iter(1, 2, 3)|
divmod("a", [])|slice(1, 2, 3, 4)|sum(["a"], "b")|{1}.pop(2)|{1: 2}.pop(1, 2, 3)|int(1, [])|"a".join(1)|
{collections.deque(): 1}|operator.length_hint([], "a")|itertools.islice([], 1.5)|itertools.tee(1, "a")|
itertools.repeat(1, None)|operator.itemgetter()|reversed(1)|operator.setitem((), 0, 1)|{1} & []
"""  # noqa: E501


@program
def sets_of_objects_and_iterators(capture):
    @capture
    def run(x, objects):
        members, made, few = set(objects), {object() for _ in range(9)}, {1, 2}
        order, back = [objects.index(one) for one in members], reversed({"a": 1, "b": 2})
        last, text, names = list(made), iter("abc"), collections.namedtuple("T", {"a", "b"})._fields
        weft_capture.graph_break()
        same = last == list(made), names == (*{"a", "b"},), type(text), list(back)
        try:
            for one in few:
                few.add(one + 10)
                weft_capture.graph_break()
        except RuntimeError as error:
            return order, same, str(error), list(reversed(torch.nn.ModuleList(objects[:2])))

    return [run(X, objects) for objects in (_OBJECTS, _OBJECTS, _OBJECTS[::-1])]


@program
def a_dict_lets_go_of_an_object(capture):
    class Dying(list):
        def __del__(self):
            self.pop().append("dies")

    @capture
    def run(x, log):
        names = {"one": Dying([log])}
        names["one"] = x + 1
        log.append("set")
        return log

    return run(X, []), run(X, [])


@program
def a_dict_of_variables_is_seen_twice(capture):
    @capture
    def run():
        first = locals()
        exec("made = 1")
        weft_capture.graph_break()
        return first is locals(), sorted(vars()), eval("'made' in locals()")

    return capture(lambda x: (run(), x.tolist()))(X)


@program
def wrong_arguments(capture):
    trace, names = [], {"collections": collections, "itertools": itertools, "operator": operator}
    for text in _WRONG.replace("\n", "").split("|"):
        exec(f"def run(x):\n try: return x, {text}\n except Exception as e: return repr(e)", names)
        trace.append(capture(names["run"])(X))
    return trace
