"""Architectures of the transformers library, from small configurations with random weights."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from models.case import Case

BATCH, LENGTH, VOCABULARY, HIDDEN, LAYERS = 4, 64, 1000, 192, 3


def _tokens() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randint(0, VOCABULARY, (BATCH, LENGTH)),), {}


def _images() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(BATCH, 3, 64, 64),), {}


def _maker(kind: str, config: transformers.PretrainedConfig) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, kind)(config)


BERT = transformers.BertConfig(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    intermediate_size=4 * HIDDEN,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
GPT2 = transformers.GPT2Config(
    vocab_size=VOCABULARY,
    n_embd=HIDDEN,
    n_layer=LAYERS,
    n_head=4,
    n_positions=128,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
    use_cache=False,
)
LLAMA = transformers.LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=512,
    max_position_embeddings=128,
    use_cache=False,
)
VIT = transformers.ViTConfig(
    image_size=64,
    patch_size=8,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    intermediate_size=4 * HIDDEN,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
T5 = transformers.T5Config(
    vocab_size=VOCABULARY,
    d_model=HIDDEN,
    d_kv=48,
    d_ff=512,
    num_layers=LAYERS,
    num_heads=4,
    dropout_rate=0.0,
    use_cache=False,
)

TRANSFORMERS = (
    Case("bert", _maker("BertModel", BERT), _tokens),
    Case("gpt2", _maker("GPT2Model", GPT2), _tokens),
    Case("llama", _maker("LlamaModel", LLAMA), _tokens),
    Case("vit", _maker("ViTModel", VIT), _images),
    Case("t5", _maker("T5EncoderModel", T5), _tokens),
)
