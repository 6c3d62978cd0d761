"""Small models of libraries that build on torch, for `architectures.py --libraries`.

Each row makes a model and the inputs that it takes by name. Its library has to be installed:
x-transformers, diffusers, torch-geometric, peft, torchdiffeq, e3nn, local-attention.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Case = tuple[Any, dict[str, Any]]


def _made(path: str, **config: Any) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)(**config)


class _Given(nn.Module):
    """Calls a model with its inputs in order."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(*inputs.values())


def _tokens(layers: str, **config: Any) -> Case:
    made = _made(f"x_transformers.{layers}", dim=32, depth=2, heads=2, **config)
    path = "x_transformers.TransformerWrapper"
    model = _made(path, num_tokens=64, max_seq_len=32, attn_layers=made)
    return model, {"x": torch.randint(0, 64, (2, 16))}


def _unet(condition: bool) -> Case:
    kinds = ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D") if condition else (
        "AttnDownBlock2D", "AttnUpBlock2D"
    )  # fmt: skip
    model = _made(
        f"diffusers.UNet2D{'Condition' if condition else ''}Model",
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1,
        block_out_channels=(16, 32), norm_num_groups=4, attention_head_dim=8,
        down_block_types=("DownBlock2D", kinds[0]), up_block_types=(kinds[1], "UpBlock2D"),
        **({"cross_attention_dim": 16} if condition else {}),
    )  # fmt: skip
    inputs = {"sample": torch.randn(2, 4, 16, 16), "timestep": torch.tensor([3, 7])}
    return model, inputs | ({"encoder_hidden_states": torch.randn(2, 7, 16)} if condition else {})


def _autoencoder() -> Case:
    model = _made(
        "diffusers.AutoencoderKL", block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return model, {"sample": torch.randn(1, 3, 32, 32)}


def _sd3() -> Case:
    model = _made(
        "diffusers.SD3Transformer2DModel", sample_size=8, in_channels=4, out_channels=4,
        num_layers=2, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16,
        caption_projection_dim=16, pooled_projection_dim=16,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 8, 8), "timestep": torch.tensor([3]),
        "encoder_hidden_states": torch.randn(1, 5, 16), "pooled_projections": torch.randn(1, 16),
    }  # fmt: skip


def _flux() -> Case:
    model = _made(
        "diffusers.FluxTransformer2DModel", in_channels=4, num_layers=1, num_single_layers=1,
        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16,
        pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 5, 16),
        "pooled_projections": torch.randn(1, 16), "timestep": torch.tensor([0.3]),
        "img_ids": torch.rand(16, 3), "txt_ids": torch.zeros(5, 3),
    }  # fmt: skip


class _Graph(nn.Module):
    """Two convolutions over a graph."""

    def __init__(self, kind: str, **config: Any) -> None:
        super().__init__()
        of = f"torch_geometric.nn.{kind}"
        self.first = _made(of, in_channels=8, out_channels=16, **config)
        self.second = _made(of, in_channels=16, out_channels=4, **config)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> Any:
        return self.second(self.first(x, edges).relu(), edges)


def _graph(kind: str, **config: Any) -> Case:
    edges = torch.randint(0, 10, (2, 30))
    return _Graph(kind, **config), {"x": torch.randn(10, 8), "edges": edges}


class _Solved(nn.Module):
    """A differential equation whose right side is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, y: torch.Tensor, times: torch.Tensor) -> Any:
        solve = importlib.import_module("torchdiffeq").odeint
        return solve(lambda _, state: self.net(state), y, times, method="rk4")


def _adapted(**config: Any) -> Case:
    peft = importlib.import_module("peft")
    base = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    settings = peft.LoraConfig(r=2, target_modules=["0", "2"], **config)
    return _Given(peft.get_peft_model(base, settings)), {"input": torch.randn(5, 8)}


def _equivariant() -> Case:
    parts = "4x0e+2x1o"
    product = importlib.import_module("e3nn.o3").FullyConnectedTensorProduct(parts, parts, parts)
    return _Given(product), {"left": torch.randn(3, 10), "right": torch.randn(3, 10)}


def _local() -> Case:
    model = _made(
        "local_attention.LocalTransformer", num_tokens=64, dim=32, depth=2, max_seq_len=64,
        causal=True, local_attn_window_size=16,
    )  # fmt: skip
    return model, {"x": torch.randint(0, 64, (2, 32))}


LIBRARY_MODELS: dict[str, Callable[[], Case]] = {
    "x_transformers decoder": lambda: _tokens("Decoder", rotary_pos_emb=True),
    "x_transformers alibi": lambda: _tokens("Decoder", alibi_pos_bias=True, ff_glu=True),
    "x_transformers encoder": lambda: _tokens("Encoder", use_rmsnorm=True),
    "diffusers unet": lambda: _unet(condition=False),
    "diffusers conditioned unet": lambda: _unet(condition=True),
    "diffusers autoencoder": _autoencoder,
    "diffusers sd3": _sd3,
    "diffusers flux": _flux,
    **{
        f"torch_geometric {kind}": lambda kind=kind: _graph(kind)  # type: ignore[misc]
        for kind in ("SAGEConv", "GraphConv", "GCNConv", "GATConv", "TransformerConv", "TAGConv")
    },
    "torchdiffeq rk4": lambda: (
        _Solved(),
        {"y": torch.randn(4, 2), "times": torch.linspace(0, 1, 5)},
    ),
    "peft lora": _adapted,
    "peft dora": lambda: _adapted(use_dora=True),
    "e3nn tensor product": _equivariant,
    "local_attention": _local,
}
