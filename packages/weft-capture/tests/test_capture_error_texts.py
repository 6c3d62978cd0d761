"""Texts of the errors that builtins raise for what they do not take, compared with eager's."""

import enum
import functools
import itertools
import operator
import re

import pytest
import torch
import weft_capture

X = torch.ones(1)
MODULES = {one.__name__: one for one in (functools, itertools, operator)}
# One expression a line.
REFUSED = """
iter(NoCall(),3)
iter(Plain(),3)
len(itertools.chain([1]))
NoCall()()
iter(NoIter())
len(NoLength())
len(NoItems())
NoItems()[0]
list(NoNext())
iter(NoNext())
next(NoNext())
next(Plain())
len(x for x in [1])
len(map(abs,[1]))
len(zip())
len(itertools.islice([1],1))
len(itertools.count())
len(enumerate([]))
len(reversed([1]))
len(iter([1]))
len(iter((1,)))
len(iter({}))
len(iter({1}))
len(itertools.repeat(1))
len(itertools.cycle([1]))
reversed(Plain())
itertools.chain([1])[0]
itertools.chain([1])+1
zip()[0]
map(abs,[])+1
itertools.groupby([1])[0]
abs(itertools.chain())
hash([])
hash({})
len(5)
iter(5)
min([])
max(())
sum('a')
sorted(5)
set(5)
dict(5)
dict([1])
tuple(5)
delattr(ValueError(),'extra')
delattr(Plain(),'extra')
list(5)
reversed({1})
enumerate(5)
zip(5)
map(5)
filter(5)
map(5,[1])
list(map(5,[1]))
list(filter(5,[1]))
itertools.chain(5)
list(itertools.chain(5))
itertools.islice(5)
itertools.islice([1],-1)
itertools.repeat()
itertools.accumulate(5)
itertools.pairwise(5)
itertools.groupby(5)
list(itertools.starmap(5,[(1,)]))
list(itertools.starmap(abs,[1]))
itertools.takewhile(5)
len(itertools.takewhile(bool,[]))
iter([],3)
iter(3,3)
iter(len,3,3)
next(5)
next([])
next(iter([1]),1,2)
isinstance(1,2)
issubclass(1,int)
issubclass(int,2)
callable()
getattr(1)
getattr(Plain(),'q')
setattr(Plain(),1,2)
hasattr(1,2)
Plain()()
Plain()[0]
Plain()+1
-Plain()
Plain()<Plain()
Plain()<1
1<Plain()
[1]<(1,)
len(Plain())
bool(NoLength())
bool(NoIter())
int(Plain())
float(Plain())
int('q')
float('q')
ord('ab')
chr(-1)
round('a')
divmod(1,0)
pow(0,-1)
abs('a')
'a'+1
1+'a'
[1]+(1,)
(1,)+[1]
[][0]
()[0]
''[0]
{}['k']
{}.popitem()
set().pop()
[].pop()
[].remove(1)
[].index(1)
().index(1)
'a'.index('b')
{1}.remove(2)
[1,2][Plain()]
(1,)[Plain()]
{}[[]]
{[]:1}
{[]}
{}|1
{1}|[1]
entered(NoEnter())
entered(Plain())
[*5]
(*Plain(),)
{**5}
{**Plain()}
takes_a(*5)
takes_a(**5)
takes_a(1,2)
takes_a(q=1)
takes_names(1)
unpacked([1])
unpacked([1,2,3])
unpacked(5)
type('A',(int,str),{})
super(Plain,1)
object.__new__(5)
Plain(1)
Plain.q
Plain().q.r
None.x
None()
None[0]
'a' in 5
5 in 5
Plain() in Plain()
1 in Plain()
1 in NoIter()
range(1,2,0)
range('a')
slice()
''.join([1])
'a'%(1,)
'%d'%'a'
'{}'.format()
'{a}'.format()
b'a'+'a'
bytes(-1)
int.from_bytes(1)
memoryview(1)
complex('a')
all(5)
any(5)
min(1)
max(Plain(),Plain())
sum([[1]])
'a'*{}
{}*'a'
'a'*Plain()
functools.partial(5)
type(itertools.chain.from_iterable([])).__name__[9]
itertools.chain.from_iterable([])+1
max(itertools.chain([1,'a'],map(abs,5)))
iter(BadIter())
list(iter(BadIter()))
operator.setitem(Deletes(),0,1)
operator.setitem(Plain(),0,1)
Int(1)[0]
Int(1)+'a'
Text('a')*2.5
Text('a').v
Text('a')[Text('b')]
range(Text('a'))
'{0.v}'.format(Text('a'))
int(Text('a'))
len(Int(1))
reversed(Int(1))
getattr(Plain(),Int(1))
''.join([Int(1)])
sum([Text('a')])
sum([],Text('a'))
'%d'%(Text('a'),)
'%d'%(Plain(),)
format(Int(1),'s')
list(stepped(Int(1)))
isinstance(1,frozenset([1]))
functools.reduce(len,Level.A)
iter(torch.float32)
operator.setitem(Plain,0,1)
operator.delitem(Plain,0)
{}.update(iter([1,2]))
"""
OF_A_CLASS = """
5 in K()
hash(K())
reversed(K())
len(K())
bool(K())
K()()
K()[0]
K() + 1
1 + K()
K() < 1
K() == 1
K() != 1
abs(K())
-K()
int(K())
float(K())
round(K())
str(K())
format(K())
iter(K())
next(K())
list(K())
entered(K())
divmod(K(), 1)
K() @ 1
[1][K()]
range(K())
K().missing
sum(K())
bytes(K())
complex(K())
isinstance(1, K())
"""
METHODS = """
__contains__ __hash__ __reversed__ __len__ __bool__ __call__ __getitem__ __add__
__radd__ __lt__ __gt__ __eq__ __ne__ __abs__ __neg__ __int__ __index__ __float__
__round__ __str__ __format__ __iter__ __next__ __enter__ __exit__ __divmod__ __matmul__
__bytes__ __complex__ __instancecheck__
"""


class Plain:
    pass


class NoCall:
    __call__ = None


class NoIter:
    __iter__ = None


class NoLength:
    __len__ = None


class NoItems:
    __getitem__ = None


class NoNext:
    __next__ = None

    def __iter__(self):
        return self


class BadIter(Exception):
    def __iter__(self):
        return None


class Deletes:
    def __delitem__(self, key):
        pass


class Int(int):
    pass


class Text(str):
    pass


class Level(enum.IntEnum):
    A = 1


def stepped(items):
    yield from items


class NoEnter:
    __enter__ = __exit__ = None


def entered(manager):
    with manager:
        pass


def takes_a(a):
    return a


def takes_names(*, k):
    return k


def unpacked(v):
    a, b = v


def agree(expression, **names):
    text = f"""def function(x):
        y = x + 1
        try:
            made = {expression}
        except Exception as error:
            return type(error).__name__, str(error), y
        return type(made).__name__, y
    """
    namespace = globals() | MODULES | names
    exec(text, namespace)
    function = namespace["function"]
    captured = weft_capture.capture(function, lambda graph, inputs: graph.forward)
    theirs, ours = (re.sub("0x[0-9a-f]+", "", str(run(X))) for run in (function, captured))
    assert theirs == ours


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("expression", REFUSED.split("\n")[1:-1])
def test_texts_of_errors(expression):
    agree(expression)


RESULTS = {"none": None, "text": "five", "list": [5], "refusal": NotImplemented}


@pytest.mark.sampled
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("expression", OF_A_CLASS.split("\n")[1:-1])
def test_texts_of_errors_of_special_methods(expression, result):
    methods = [None if result == "none" else lambda *_: RESULTS[result]] * 30
    agree(expression, K=type("K", (), dict(zip(METHODS.split(), methods, strict=True))))


def test_text_of_an_error_of_a_real_operation():
    def function(x):
        try:
            Deletes()[0] = x + 1
        except AttributeError as error:
            return str(error), x * 2

    report = weft_capture.explain(function)(X)
    assert [one.code for one in report.breaks] == ["builtin-error"]


class Spoken(Exception):
    def __repr__(self):
        return ()


@pytest.mark.parametrize("text", [repr, "{!r}".format, "%r".__mod__])
def test_a_text_of_an_exception_has_to_be_one(text):
    def function(x):
        try:
            return text(Spoken()), x
        except TypeError as error:
            return str(error), x

    assert weft_capture.capture(function, lambda graph, inputs: graph.forward)(X) == function(X)


def test_a_call_that_lacks_arguments_is_guarded_on_the_defaults():
    def helper(x, by=1):
        return x * by

    def function():
        try:
            return helper()
        except TypeError as error:
            return str(error)

    compiled = weft_capture.capture(function, lambda graph, inputs: graph.forward)
    for defaults in ((1,), None, (1, 2), (3,)):
        helper.__defaults__ = defaults
        assert compiled() == function()


def test_products_of_unlike_dtypes_raise_inside_of_a_program():
    def function(x):
        try:
            return torch.nn.functional.linear(x.long()[None], x[None])
        except RuntimeError as error:
            return str(error)

    assert weft_capture.capture(function, lambda graph, inputs: graph.forward)(X) == function(X)
