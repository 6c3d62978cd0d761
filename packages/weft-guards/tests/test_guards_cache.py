"""The code cache: lookup order, recompile reasons and limit, eviction, threads, no leaks."""

import gc
import logging
import threading
import weakref

import pytest
import torch
from weft_core import events
from weft_core.errors import RecompileLimit
from weft_guards import CodeCache, GuardSet, arg_names_of, compile_check
from weft_guards.config import settings
from weft_guards.sources import InstanceAttrSource, LocalSource


def user_function(x):
    return x


X = LocalSource("x")
CODE = user_function.__code__


@pytest.fixture(autouse=True)
def quiet():
    gc.collect()  # other tests may have left entries to evict
    events.reset()
    yield
    events.set_logs(**dict.fromkeys(events.ARTIFACTS, False))
    events.reset()


def code_named(name):
    return CODE.replace(co_name=name)


def add(cache, name, kind, value, source=X):
    guards = GuardSet()
    guards.add(source, kind, value)
    return cache.add(compile_check(guards, arg_names_of(CODE)), code_named(name), guards)


def hit(cache, value):
    code = cache.lookup(user_function, value)
    return code and code.co_name


def test_lookup_finds_the_entry_that_fits():
    cache = CodeCache(CODE)
    assert hit(cache, 1) is None
    add(cache, "one", "CONST", 1)
    add(cache, "two", "CONST", 2)
    assert [hit(cache, value) for value in (1, 2, 3, 1)] == ["one", "two", None, "one"]


def test_a_hit_moves_to_the_front():
    cache = CodeCache(CODE)
    for number in (1, 2, 3):
        add(cache, str(number), "CONST", number)
    assert hit(cache, 1) == "1"
    assert [entry.code.co_name for entry in cache.entries] == ["1", "3", "2"]


class Thing:
    pass


@pytest.mark.parametrize("kind", ["ID", "TYPE"])
def test_entries_do_not_keep_objects_alive_and_go_with_them(kind):
    cache = CodeCache(CODE)
    if kind == "ID":
        value = Thing()
        add(cache, "entry", kind, value)
        assert hit(cache, value) == "entry"
    else:
        value = type("Local", (), {})
        add(cache, "entry", kind, value)
        assert hit(cache, value()) == "entry"
    add(cache, "stays", "CONST", 5)
    alive = weakref.ref(value)
    entry = weakref.ref(cache.entries[1])
    del value
    gc.collect()
    assert alive() is None
    assert entry() is None
    assert [entry.code.co_name for entry in cache.entries] == ["stays"]
    assert hit(cache, None) is None
    assert events.counters["guards"]["evicted"] == 1


def test_tensors_modules_and_compiled_graphs_do_not_leak():
    module = torch.nn.Linear(2, 2)
    cache = CodeCache(CODE)
    guards = GuardSet()
    guards.add(X, "ID", module)
    weight = InstanceAttrSource(X, "_parameters")
    guards.add(weight, "DICT_KEYS", module._parameters)
    guards.add(InstanceAttrSource(X, "training"), "CONST", True)
    graph = Thing()
    code = CODE.replace(co_consts=(*CODE.co_consts, graph))
    cache.add(compile_check(guards, ("x",)), code, guards)
    refs = [weakref.ref(module), weakref.ref(module.weight), weakref.ref(graph)]
    assert cache.lookup(user_function, module) is code
    del module, graph, code, guards
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3
    assert cache.entries == ()


def test_dropping_the_cache_frees_it_while_its_objects_live():
    value = Thing()
    cache = CodeCache(CODE)
    add(cache, "entry", "ID", value)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    del value  # its callbacks find no cache, and say nothing


def test_death_while_adding():
    cache = CodeCache(CODE)
    value = Thing()
    guards = GuardSet()
    guards.add(X, "ID", value)
    check = compile_check(guards, ("x",))
    del value
    gc.collect()
    cache.add(check, CODE, guards)
    assert cache.entries == ()


def test_a_new_object_at_an_old_address_does_not_match():
    cache = CodeCache(CODE)
    for _ in range(50):
        value = Thing()
        assert hit(cache, value) is None
        add(cache, "entry", "ID", value)
        assert hit(cache, value) == "entry"
        del value


def test_recompiles_are_explained(caplog):
    cache = CodeCache(CODE)
    assert cache.may_compile(user_function, (1,))
    add(cache, "one", "CONST", 1)
    events.set_logs(recompiles=True, recompiles_verbose=True)
    assert cache.may_compile(user_function, (2,))
    assert "recompiling user_function" in caplog.messages[0]
    assert "L['x']: 1 -> 2" in caplog.messages[0]
    assert "what to do" in caplog.messages[0]
    assert events.counters["guards"]["recompiles"] == 1


def test_guards_artifact(caplog):
    events.set_logs(guards=logging.DEBUG)
    add(CodeCache(CODE), "one", "CONST", 1)
    assert "L['x'] == 1" in caplog.text
    assert "EQUAL" in caplog.text or "def check" in caplog.text


def test_recompile_limit_warns_once_and_keeps_what_is_there():
    cache = CodeCache(CODE)
    with settings.patch(recompile_limit=2):
        add(cache, "1", "CONST", 1)
        assert cache.may_compile(user_function, (2,))
        add(cache, "2", "CONST", 2)
        with pytest.raises(RecompileLimit, match="compiled 2 times"):
            cache.may_compile(user_function, (3,), strict=True)
        with pytest.warns(UserWarning, match=r"L\['x'\]: 1 -> 3"):
            assert not cache.may_compile(user_function, (3,))
        assert not cache.may_compile(user_function, (4,))
    assert cache.skip_reason == "recompile limit"
    assert hit(cache, 1) == "1"
    cache.clear()
    assert cache.may_compile(user_function, (3,))
    assert cache.entries == ()


def test_mark_skip():
    cache = CodeCache(CODE)
    cache.skip_reason = "disabled"
    assert not cache.may_compile(user_function, (1,))


def test_many_threads():
    cache = CodeCache(CODE)
    things = [Thing() for _ in range(8)]
    wrong = []

    def work(index):
        thing = things[index]
        for _ in range(200):
            name = hit(cache, thing)
            if name is None:
                add(cache, str(index), "ID", thing)
            elif name != str(index):
                wrong.append((index, name))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert {entry.code.co_name for entry in cache.entries} == set(map(str, range(8)))
