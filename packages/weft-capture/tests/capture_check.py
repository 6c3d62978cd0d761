"""What tests of capture share: a backend that runs graphs eagerly, and comparisons with eager."""

import collections
import copy
import enum

import numpy as np
import torch
import weft_capture

X = torch.arange(6.0).reshape(2, 3)
Pair = collections.namedtuple("Pair", ["a", "b"])


def eager_backend(graph, inputs):
    graph.graph.lint()
    return graph.forward


def same(left, right):
    """Equality of results that may hold tensors."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "__dict__") and not isinstance(left, (type, enum.Enum)):
        return same(vars(left), vars(right))
    return left == right


def check(function, *args, fullgraph=True):
    """Run eager and captured on copies of the arguments; compare results and arguments after."""
    eager_args, args_1, args_2 = copy.deepcopy(args), copy.deepcopy(args), copy.deepcopy(args)
    expected = function(*eager_args)
    optimised = weft_capture.capture(function, eager_backend, fullgraph=fullgraph)
    for given in (args_1, args_2):
        result = optimised(*given)
        assert same(expected, result), (expected, result)
        assert same(list(eager_args), list(given)), "arguments differ afterwards"
    return optimised._weft_capture


class Manager:
    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("enter")
        return self

    def __exit__(self, kind, error, traceback):
        self.log.append("exit")
        return kind is ValueError
