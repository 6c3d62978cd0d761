"""Branches on tensors that raise: asserts, validation, helpers that raise."""

import contextlib

import torch
from torch import distributions

from constructs import case


class Checked:
    def __init__(self, x):
        if x.isnan().any():
            self.refuse("nan", x)
        self.x = x

    def refuse(self, what, x):
        raise ValueError(f"{what}: {x}")


def refuse(x):
    raise ValueError(f"not {x}")


def finite(x):
    if not torch.isfinite(x).all():
        raise ValueError(f"not finite: {x}")
    return x


@case
def check_passes(x):
    if torch.isnan(x).any():
        raise ValueError("nan")
    return x + 1


@torch.inference_mode()
def inferred():
    return (torch.ones(2, 3),)


@case(inputs=inferred)
def check_of_inference_tensor(x):
    return finite(x * 2) + x


@case(inputs=inferred)
@torch.inference_mode()
def check_after_write_to_inference_tensor(x):
    x[0].relu_()
    assert x.sum() > 99, "small"
    return x + 1


@case
def check_in_helpers(x):
    if (x > 99).any():
        refuse(x)
    return finite(x) + Checked(x).x


@case
def check_after_effects(x):
    seen = [1]
    y = x * 2
    seen.append(len(seen))
    assert (y < 99).all(), f"too large: {y}"
    with torch.no_grad():
        finite(y)
    return y, seen


@case
def check_fails_in_with(x):
    with contextlib.suppress(ValueError):
        finite(x / 0)
        return x
    return x + 1


@case
def check_before_either_return(x):
    if (x < 99).all():
        return x * 3
    raise ValueError(f"too large: {x}")


@case
def check_fails_in_try(x):
    try:
        finite(x / 0)
    except ValueError as error:
        return x, str(error)[:11]
    return x


@case
def validated_distributions(x):
    normal = distributions.Normal(x, x.exp(), validate_args=True)
    categorical = distributions.Categorical(logits=x, validate_args=True)
    inside = distributions.Uniform(x, x + 2, validate_args=True).log_prob(x + 1)
    return normal.log_prob(x), categorical.log_prob(torch.tensor(2)), inside


@case
def validated_multivariate(x):
    root = torch.eye(3) * 2
    normal = distributions.MultivariateNormal(x, scale_tril=root, validate_args=True)
    return normal.log_prob(x * 2)
