"""Operators that fail on their data: handlers, effects before and behind, tracebacks."""

import traceback

import torch

from constructs import case


def looked_up(table, index, log):
    log.append("before")
    row = table[index]
    log.append("behind")
    return row


@case
def caught_where_it_stands(x):
    log = []
    try:
        log.append("begun")
        y = torch.linalg.cholesky(-torch.eye(3) + 0 * x.sum())
        log.append("factored")
    except RuntimeError as error:
        log.append(type(error).__name__)
        y = torch.linalg.cholesky(torch.eye(3) + 0 * x.sum())
    return y + 1, log


@case
def caught_around_a_callee(x):
    log = []
    try:
        y = looked_up(x, torch.tensor([0, 99]), log)
    except IndexError as error:
        log.append(str(error))
        y = looked_up(x, torch.tensor([0, 1]), log)
    finally:
        log.append("finally")
    return y * 2, log


@case
def effects_before_the_second_failure(x):
    log = {}
    table = torch.arange(6.0).reshape(3, 2)
    for place in (1, 2, 7, 1):
        try:
            log[place] = torch.nn.functional.embedding(torch.tensor([place]), table).sum().item()
        except IndexError:
            log[place] = None
    return x + 1, log


@case
def uncaught_shows_the_line(x):
    log = []
    try:
        inner(x, log)
    except IndexError as error:
        log.append([entry.name for entry in traceback.extract_tb(error.__traceback__)][-2:])
    return x * 2, log


def inner(x, log):
    return looked_up(x * 2, torch.tensor([50]), log)


@case
def handler_of_a_with_block(x):
    class Suppress:
        def __enter__(self):
            return []

        def __exit__(self, kind, error, where):
            self.kind = kind
            return True

    block = Suppress()
    with block as log:
        log.append("in")
        log.append(torch.gather(x, 0, torch.full((1, 1), 77)))
    return x + 1, log, block.kind.__name__
