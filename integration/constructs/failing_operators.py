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


@case
def results_that_nobody_uses(x):
    log = []
    far, none = torch.tensor([[77]]), torch.zeros(2, 3, dtype=torch.int64)
    attempts = (
        lambda: x[far],
        lambda: x.gather(0, far) + 1,
        lambda: torch.linalg.eigvalsh(x[:, :2] / 0),
        lambda: torch.nn.functional.nll_loss(x, far[:, 0].expand(2)),
        lambda: x.long() // none,
        lambda: torch._assert_async(x.sum() < 0),
    )
    for attempt in attempts:
        try:
            attempt()
            log.append("none")
        except (IndexError, RuntimeError) as error:
            log.append(str(error))
    return x + 1, log
