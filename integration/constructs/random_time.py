"""Random numbers and clocks: they must run at each call."""

import datetime
import os
import random
import time
import uuid

import numpy as np
import torch

from constructs import case

LAST = [0.0]


@case
def random_random(x):
    return x + random.random()


@case
def random_integers(x):
    return x + random.randint(1, 100), random.randrange(10), random.getrandbits(8)


@case
def random_choice_and_uniform(x):
    return x * random.uniform(1, 2), random.choice([1, 2, 3]), random.choices("ab", k=3)


@case
def random_shuffle_and_sample(x):
    items = list(range(6))
    random.shuffle(items)
    return x + 1, items, random.sample(range(9), 3)


@case
def random_in_condition(x):
    if random.random() < 0.5:
        return x + 1
    return x - 1


@case
def random_seeded_inside(x):
    random.seed(3)
    return x + random.random(), random.gauss(0, 1)


@case
def random_generator_object(x):
    rng = random.Random(5)
    return x + rng.random(), rng.randint(0, 9)


@case
def torch_random(x):
    return x + torch.rand(3), torch.randn_like(x)


@case
def torch_manual_seed(x):
    torch.manual_seed(1)
    return x + torch.rand(3)


@case
def dropout(x):
    return torch.nn.functional.dropout(x, 0.5, training=True)


@case
def clock_moves_on(x):
    now = time.perf_counter()
    later = LAST[0] < now
    LAST[0] = now
    return x + 1, later


@case
def time_around_work(x):
    start = time.time()
    y = x * 2
    elapsed = time.time() - start
    return y, elapsed >= 0, time.monotonic_ns() > 0


@case
def sleep(x):
    time.sleep(0)
    return x + 1


@case
def date_arithmetic(x):
    day = datetime.date(2024, 2, 28) + datetime.timedelta(days=2)
    return x + day.day, day.isoformat()


@case
def date_now(x):
    return x + 1, datetime.datetime.now().year > 2000


@case
def environment(x):
    os.environ["WEFT_CONSTRUCT"] = "4"
    return (
        x + int(os.environ.get("WEFT_CONSTRUCT", "1")),
        os.path.join("a", "b"),
        os.getenv("NOT_THERE_AT_ALL"),
    )


@case
def unique_ids(x):
    return x + 1, uuid.uuid4() != uuid.uuid4()


@case
def numbers_of_numpy(x):
    np.random.seed(7)
    share, count = np.random.beta(0.2, 0.2), np.random.randint(0, 10)
    mixed = share * x + (1 - share) * x.flip(0) + np.random.uniform(low=1, high=2)
    return mixed, share, count, np.random.rand() < 2, np.random.normal(0.0, scale=2.0)
