"""A step of training with padded products, forward and backward (`shape_padding`)."""

import pytest
import torch
import weft
from torch import nn
from torch.nn import functional as F
from weft_codegen import padded_products


class Model(nn.Module):
    """Sizes that no product is aligned with: attention over 9 places, 27 features, 101 classes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.first = nn.Linear(16, 27)
        self.head = nn.Linear(27, 101, bias=False)

    def forward(self, x, labels):
        x = F.gelu(self.first(self.norm(x)))
        x = (x @ x.transpose(1, 2)).softmax(-1) @ x
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_training_with_padded_products(monkeypatch, dynamic, padding):
    monkeypatch.setattr(padded_products, "alignment", lambda value: 8)
    monkeypatch.setattr(padded_products, "_PER_PRODUCT", 1.0)
    seen = []
    options = {
        "shape_padding": padding,
        "post_grad_custom_pre_pass": lambda graph: seen.extend(
            node for node in graph.nodes if "constant_pad_nd" in str(node.target)
        ),
    }
    torch.manual_seed(0)
    model = Model().double()
    compiled = weft.compile(model, dynamic=dynamic, options=options)
    for batch in (3, 5):
        x = torch.randn(batch, 9, 16, dtype=torch.float64, requires_grad=True)
        labels = torch.randint(0, 101, (batch, 9))
        sources = [x, *model.parameters()]
        expected = model(x, labels)
        found = compiled(x, labels)
        torch.testing.assert_close(found, expected)
        assert found[1].stride() == expected[1].stride()
        total, wanted = (loss + logits.sin().mean() for loss, logits in (found, expected))
        gradients = torch.autograd.grad(total, sources)
        for gradient, want in zip(gradients, torch.autograd.grad(wanted, sources), strict=True):
            torch.testing.assert_close(gradient, want)
            assert gradient.is_contiguous()
    assert bool(seen) is padding
