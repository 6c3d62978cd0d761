"""A small GPT over characters, and the text that the examples train it on.

The text is the documentation in the standard library's `pydoc_data.topics`, so nothing is
downloaded.
"""

from dataclasses import dataclass
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 128
BATCH = 16


class Block(nn.Module):
    """Attention and a perceptron, each on a normalised residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, length, width)` to the same shape."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.shrink(F.gelu(self.grow(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A language model over characters."""

    def __init__(self, vocabulary: int, width: int = 128, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(BLOCK, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits `(batch, length, vocabulary)` for tokens `(batch, length)`."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of the next character."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


@dataclass
class Text:
    """The training text as numbers, and the way back."""

    characters: str
    data: torch.Tensor

    @classmethod
    def load(cls) -> "Text":
        """Read the standard library's help topics, in ASCII."""
        prose = "\n".join(topics.topics[name] for name in sorted(topics.topics))
        prose = prose.encode("ascii", "ignore").decode()
        characters = "".join(sorted(set(prose)))
        number = {c: i for i, c in enumerate(characters)}
        return cls(characters, torch.tensor([number[c] for c in prose]))

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random windows of the text and the same windows one character later."""
        starts = torch.randint(len(self.data) - BLOCK - 1, (BATCH, 1), generator=generator)
        windows = self.data[starts + torch.arange(BLOCK + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def decode(self, numbers: torch.Tensor) -> str:
        """Return numbers as text."""
        return "".join(self.characters[i] for i in numbers.tolist())
