"""weakref: references and containers of objects made here or outside; handles of module hooks."""

import functools
import weakref

import torch
from torch import nn

from constructs import case


class Thing:
    def __init__(self, n=0):
        self.n = n

    def go(self):
        return 4


class HookNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        for p in self.parameters():
            nn.init.constant_(p, 0.5)

    def forward(self, x):
        return self.lin(x)


def tensor_and_net():
    return torch.arange(6.0).reshape(2, 3), HookNet()


@case
def weakref_ref(x):
    class C:
        n = 2

    c = C()
    r = weakref.ref(c)
    return x + r().n, r() is c, r is weakref.ref(c), isinstance(r, weakref.ref)


@case
def weakref_proxy(x):
    class C:
        n = 2

        def go(self):
            return self.n + 1

    c = C()
    p = weakref.proxy(c)
    p.m = 4
    return x + p.n + p.go(), c.m


@case
def weak_value_dictionary(x):
    c = Thing(2)
    d = weakref.WeakValueDictionary()
    d["a"] = c
    return (
        x + d["a"].n,
        "a" in d,
        len(d),
        d.get("q") is None,
        [k for k in d],
        [v.n for v in d.values()],
    )


@case
def weak_key_dictionary(x):
    c = Thing()
    d = weakref.WeakKeyDictionary()
    d[c] = 5
    return x + d[c], c in d, len(d), d.get(Thing(), 3)


@case
def weak_set(x):
    c = Thing()
    s = weakref.WeakSet()
    s.add(c)
    return x + len(s), c in s, Thing() in s


@case
def weak_method(x):
    c = Thing()
    m = weakref.WeakMethod(c.go)
    return x + m()()


@case
def weak_returned(x):
    c = Thing()
    d = weakref.WeakValueDictionary(a=c)
    return x + 1, c, d, weakref.ref(c)() is c


@case
def weak_dead(x):
    c = Thing()
    r = weakref.ref(c)
    del c
    return x + 1, r()


@case
def weak_dead_in_dictionary(x):
    c = Thing()
    d = weakref.WeakValueDictionary(a=c, b=Thing())
    n = len(d)
    c = None
    return x + 1, n, len(d)


@case
def weak_in_helper(x):
    def make():
        c = Thing()
        d = weakref.WeakKeyDictionary()
        d[c] = 4
        return d, len(d)

    d, n = make()
    return x + n, len(d)


@case
def weak_of_cleared_container(x):
    things = {"a": Thing()}
    r = weakref.ref(things["a"])
    things.clear()
    return x + 1, r() is None


@case
def weak_of_popped_item(x):
    things = [Thing(i) for i in range(3)]
    references = [weakref.ref(thing) for thing in things]
    things.pop()
    return x + 1, [r() is None for r in references]


@case
def weak_of_rebound_cell(x):
    c = Thing()
    r = weakref.ref(c)

    def forget():
        nonlocal c
        c = None

    forget()
    return x + 1, r() is None


@case(inputs=lambda: (torch.arange(6.0).reshape(2, 3), Thing()))
def weak_of_argument(x, c):
    r = weakref.ref(c)
    d = weakref.WeakSet([c])
    c.n = 3
    return x + r().n + len(d), r() is c


@case
def singledispatchmethod(x):
    class N:
        @functools.singledispatchmethod
        def go(self, a):
            return x

        @go.register
        def _(self, a: int):
            return x + a

        @go.register(str)
        def _(self, a):
            return x + len(a)

    n = N()
    return n.go(1.5), n.go(2), n.go("abc")


@case(inputs=tensor_and_net)
def hook_register_remove(x, net):
    h = net.lin.register_forward_hook(lambda m, a, out: out * 2)
    y = net(x)
    h.remove()
    return y, net(x), len(net.lin._forward_hooks)


@case(inputs=tensor_and_net)
def pre_hook_register_remove(x, net):
    h = net.lin.register_forward_pre_hook(lambda m, a: (a[0] + 1,))
    y = net(x)
    h.remove()
    return y, net(x)


@case(inputs=tensor_and_net)
def hook_with_kwargs(x, net):
    seen = []
    h = net.lin.register_forward_hook(lambda m, a, k, out: seen.append(out.shape), with_kwargs=True)
    y = net(x)
    h.remove()
    return y, seen


@case(inputs=tensor_and_net)
def hook_context(x, net):
    with net.lin.register_forward_hook(lambda m, a, out: out + 1):
        y = net(x)
    return y, net(x)


@case(inputs=tensor_and_net)
def hook_left(x, net):
    net.lin.register_forward_hook(lambda m, a, out: out * 2)
    y = net(x)
    return y, len(net.lin._forward_hooks)


@case(inputs=lambda: (torch.arange(6.0).reshape(2, 3).requires_grad_(), HookNet()))
def full_backward_hook(x, net):
    h = net.register_full_backward_hook(lambda m, gi, go: None)
    h.remove()
    return net(x)


@case(inputs=tensor_and_net)
def hook_twice(x, net):
    h = net.lin.register_forward_hook(lambda m, a, out: out * 2)
    y = net(x)
    h.remove()
    g = net.lin.register_forward_hook(lambda m, a, out: out * 3)
    k = net.lin.register_forward_hook(lambda m, a, out: out * 5, prepend=True)
    z = net(x)
    g.remove()
    return y, z, net(x), len(net.lin._forward_hooks), k.id != g.id


@case
def weak_proxy_operations(x):
    class Items:
        def __init__(self):
            self.items = [3, 4]

        def __len__(self):
            return len(self.items)

        def __iter__(self):
            return iter(self.items)

    items = Items()
    proxy = weakref.proxy(items)
    kinds = isinstance(proxy, Items), isinstance(proxy, weakref.ProxyType), type(proxy).__name__
    return x + len(proxy), list(proxy), proxy is weakref.proxy(items), kinds, bool(proxy)


@case
def keys_compared_and_let_go(x):
    """What recognises the keys later must not keep them alive."""
    first, second, third = Thing(1), Thing(2), Thing(3)
    known = weakref.WeakKeyDictionary({first: 1, second: 2})
    copy = known.copy()
    copy |= [(second, 7), (third, 8)]
    assert dict(copy) == dict(known) | {second: 7, third: 8}
    del first
    return x + 1, list(known.values()), list(copy.values())


class Counted:
    def __init__(self, log):
        self.log = log

    def __hash__(self):
        return 1

    def __eq__(self, other):
        self.log.append(other is self)
        return self is other


@case
def weak_keys_that_are_compared(x):
    table, log = weakref.WeakKeyDictionary(), []
    one = Counted(log)
    table[one] = 2
    return x + 1, table[one], one in table, log
