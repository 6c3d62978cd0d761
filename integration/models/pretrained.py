"""Architectures of the transformers library, from small configurations with random weights.

The library takes seconds to import, so that happens when a model is made.
"""

import importlib
from typing import Any

import torch
from torch import nn

from models.case import Case

BATCH, LENGTH, VOCABULARY, HIDDEN, LAYERS = 4, 64, 1000, 192, 3

_BERT_LIKE = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 4 * HIDDEN,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 128,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "use_cache": False,
}
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 128,
    "use_cache": False,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "d_kv": 48,
    "d_ff": 512,
    "num_layers": LAYERS,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "use_cache": False,
}


def _tokens() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randint(0, VOCABULARY, (BATCH, LENGTH)),), {}


def _images() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(BATCH, 3, 64, 64),), {}


def _case(name: str, model: str, config: str, settings: dict[str, Any], inputs: Any) -> Case:
    def make() -> nn.Module:
        library = importlib.import_module("transformers")
        return getattr(library, model)(getattr(library, config)(**settings))

    return Case(name, make, inputs)


TRANSFORMERS = (
    _case("bert", "BertModel", "BertConfig", {"vocab_size": VOCABULARY, **_BERT_LIKE}, _tokens),
    _case("gpt2", "GPT2Model", "GPT2Config", _GPT2, _tokens),
    _case("llama", "LlamaModel", "LlamaConfig", _LLAMA, _tokens),
    _case(
        "vit", "ViTModel", "ViTConfig", {"image_size": 64, "patch_size": 8, **_BERT_LIKE}, _images
    ),
    _case("t5", "T5EncoderModel", "T5Config", _T5, _tokens),
)
