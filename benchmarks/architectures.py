"""Every architecture of transformers or timm that a small random model can be made of, compiled.

    python benchmarks/architectures.py [NAME ...]
    python benchmarks/architectures.py --timm [MODULE ...]
    python benchmarks/architectures.py --libraries [NAME ...]    models of library_models.py

For each one a forward and backward: breaks by code, graphs, seconds of the first call (C kernels
included). *equal*: outputs and gradients are eager's, or not further from float64's than twice
eager's own, for these inputs or some a unit in the last place beside them. *as compiled*: the model
asks `is_compiling()` and does something else then; eager does the same, errors included, where it
is told yes. Left out: what needs files, more than 6 million parameters (of timm the smallest model
of each module, up to 40 million), 200 seconds or other inputs than tokens, pictures or sound, and
what is random.
"""

from __future__ import annotations

import copy
import importlib
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import transformers
import weft
from library_models import LIBRARY_MODELS
from torch.utils import _pytree as pytree
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

Make = Callable[[str], "tuple[Any, dict[str, torch.Tensor]] | None"]
Result = tuple[list[torch.Tensor], dict[str, torch.Tensor]]
# Sizes by the names that configurations give them.
SIZES = {
    32: "hidden_size d_model n_embd dim embed_dim embedding_size image_size moe_intermediate_size",
    2: "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers eos_token_id "
    "num_key_value_heads num_experts_per_tok",
    4: "num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
    "num_heads num_experts num_local_experts n_routed_experts",
    64: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner hidden_dim "
    "max_position_embeddings n_positions",
    8: "d_kv head_dim patch_size",
    99: "vocab_size",
    1: "bos_token_id decoder_start_token_id",
    0: "pad_token_id dropout attention_dropout hidden_dropout_prob attention_probs_dropout_prob "
    "resid_pdrop embd_pdrop attn_pdrop activation_dropout layerdrop encoder_layerdrop "
    "decoder_layerdrop dropout_rate hidden_dropout",
}


def shrink(config: Any) -> Any:
    """The configuration with small sizes and nothing random, inner ones too."""
    for size, names in SIZES.items():
        for name in filter(lambda name: hasattr(config, name), names.split()):
            setattr(config, name, float(size) if "drop" in name else size)
    for inner in [v for v in vars(config).values() if isinstance(v, transformers.PretrainedConfig)]:
        shrink(inner)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[-2:]
    return config


def inputs_of(model: Any, batch: int) -> dict[str, torch.Tensor]:
    """Random inputs by the name of the main one."""
    config, kind = model.config, model.main_input_name
    size = getattr(config, "image_size", 32)
    size = size if isinstance(size, int) else size[0]
    torch.manual_seed(1)
    made = {
        "pixel_values": lambda: torch.randn(batch, getattr(config, "num_channels", 3), size, size),
        "input_values": lambda: torch.randn(batch, 4000),
        "input_features": lambda: torch.randn(batch, 80, 64),
        "input_ids": lambda: torch.randint(3, 99, (batch, 12)),
    }
    inputs = {kind: made[kind]()}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.randint(3, 99, (batch, 5))
    return inputs


def run(model: Any, inputs: dict[str, torch.Tensor], called: Any = None) -> Result:
    """Floating outputs and all gradients; `called` is the compiled model."""
    torch.manual_seed(0)
    model.zero_grad()
    made = (called or model)(**inputs)
    leaves = pytree.tree_leaves(dict(made) if isinstance(made, dict) else made)
    found = [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]
    sum(t.square().mean() for t in found if t.requires_grad).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return [t.detach().clone() for t in found], grads


def off(result: Result, exact: Result) -> float:
    """The greatest relative distance of an output, and of all gradients together."""
    if len(result[0]) != len(exact[0]) or result[1].keys() != exact[1].keys():
        return float("inf")
    every = [*zip(result[0], exact[0], strict=True)]
    flat = (torch.cat([g[n].double().flatten() for n in exact[1]]) for g in (result[1], exact[1]))
    every.append((next(flat), next(flat)))
    return max(float((a.double() - b).norm() / (b.double().norm() + 1e-12)) for a, b in every)


def in_float64(model: Any, inputs: dict[str, torch.Tensor]) -> Result | None:
    """The result in float64; None where an operator has no such form."""
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    try:
        return run(copy.deepcopy(model).double(), wide)
    except RuntimeError:
        return None


def neighbour(inputs: dict[str, torch.Tensor], to: float) -> dict[str, torch.Tensor]:
    """The inputs, each number one unit in the last place nearer to a number."""
    changed = {k: v for k, v in inputs.items() if v.is_floating_point()}
    return inputs | {k: torch.nextafter(v, torch.full_like(v, to)) for k, v in changed.items()}


def judge(model: Any, inputs: dict[str, torch.Tensor], compiled: Result | Exception) -> str:
    """Say how a compiled result compares with eager's."""
    eager = run(model, inputs)
    if isinstance(compiled, tuple):
        if off(compiled, eager) < 1e-4:
            return "equal"
        exact = in_float64(model, inputs)
        if exact is not None:
            near = [eager, *(run(model, neighbour(inputs, to)) for to in (-9.0, 0.0, 9.0))]
            if off(compiled, exact) <= 2 * max(off(other, exact) for other in near):
                return "equal"
    with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
        try:
            told = run(model, inputs)
        except Exception as error:
            return "as compiled" if type(error) is type(compiled) else f"WRONG: {compiled}"
    same = isinstance(compiled, tuple) and off(compiled, told) < 1e-4
    return (
        "as compiled" if same else f"WRONG: {compiled if isinstance(compiled, Exception) else ''}"
    )


def late(*_: Any) -> None:
    """End what takes too long."""
    raise TimeoutError


def made(name: str) -> tuple[Any, dict[str, torch.Tensor]] | None:
    """A small model and inputs that it takes; None where there are none."""
    try:
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(shrink(transformers.AutoConfig.for_model(name)))
        model = model.float().train()
        if sum(p.numel() for p in model.parameters()) > 6e6:
            return None
        inputs = inputs_of(model, 2)
        return (model, inputs) if off(run(model, inputs), run(model, inputs)) < 1e-6 else None
    except Exception:
        return None


def made_of_timm(module: str) -> tuple[Any, dict[str, torch.Tensor]] | None:
    """The smallest model of a module of timm, and the smallest pictures that it takes."""
    timm = importlib.import_module("timm")
    sizes = {}
    with torch.device("meta"):
        for name in timm.list_models(module=module):
            sizes[name] = sum(p.numel() for p in timm.create_model(name).parameters())
    name = min(sizes, key=sizes.__getitem__)
    if sizes[name] > 4e7:
        return None
    for size in (64, 96, 128, 192, 224, 240, 256):
        inputs = {"x": torch.randn(2, 3, size, size)}
        torch.manual_seed(0)
        try:
            try:
                model = timm.create_model(name, num_classes=10, img_size=size)
            except TypeError:
                model = timm.create_model(name, num_classes=10)
            for own in map(vars, model.train().modules()):
                own.update({k: 0.0 for k in ("p", "drop_prob") if isinstance(own.get(k), float)})
            return (model, inputs) if off(run(model, inputs), run(model, inputs)) < 1e-6 else None
        except (RuntimeError, AssertionError, ValueError):
            continue  # a size that its windows or strides do not divide
    return None


def made_of_library(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model of library_models.py, after a run in which its libraries fill their caches."""
    torch.manual_seed(0)
    model, inputs = LIBRARY_MODELS[name]()
    run(model, inputs)
    return model, inputs


def rows(names: list[str], make: Make) -> Iterator[tuple[str, str, dict[str, int], int, float]]:
    """Yield name, verdict, breaks, graphs and seconds of the first call."""
    signal.signal(signal.SIGALRM, late)
    for name in names:
        signal.alarm(200)
        case = make(name)
        if case is None:
            continue
        model, inputs = case
        weft.reset()
        weft.counters.clear()
        began = time.perf_counter()
        compiled: Result | Exception
        try:
            compiled = run(model, inputs, weft.compile(model))
        except Exception as error:
            compiled = error
        seconds = time.perf_counter() - began
        breaks, graphs = dict(weft.counters["graph_break"]), weft.counters["stats"]["unique_graphs"]
        yield name, judge(model, inputs, compiled), breaks, graphs, seconds


def main() -> None:
    """Print a row a model, and the totals."""
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    totals: Counter[str] = Counter()
    names, make = sys.argv[1:], made
    if names[:1] == ["--timm"]:
        names, make = names[1:] or importlib.import_module("timm").list_modules(), made_of_timm
    elif names[:1] == ["--libraries"]:
        names, make = names[1:] or [*LIBRARY_MODELS], made_of_library
    for name, verdict, breaks, graphs, seconds in rows(names or sorted(CONFIG_MAPPING_NAMES), make):
        whole = not breaks and graphs == 1
        totals.update({verdict[:11]: 1, "one graph": whole, "models": 1})
        told = f"{graphs:3} graphs {seconds:6.1f} s {breaks or ''}"
        print(f"{name:36} {verdict:12} {told}", flush=True)
    print(dict(totals))
    sys.exit(any(verdict.startswith("WRONG") for verdict in totals))


if __name__ == "__main__":
    main()
