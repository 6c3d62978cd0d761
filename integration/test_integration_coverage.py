"""Every row of docs/coverage/models.md: whole models of transformers, and why they break."""

import copy
import importlib

import pytest
import torch
import weft
import weft_capture

VOCABULARY = 100
_COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
_HEADS = {**_COMMON, "num_attention_heads": 2, "intermediate_size": 64}
_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2,
    "num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
_VIT = {**_HEADS, **_QUIET, "image_size": 32, "patch_size": 8}
del _VIT["vocab_size"]

# name -> (model class, configuration class, settings)
MODELS = {
    "bert": ("BertForMaskedLM", "BertConfig", {**_HEADS, **_QUIET}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, **_TOKENS}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_HEADS, **_TOKENS, "num_key_value_heads": 1}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**_T5, **_TOKENS}),
    "vit": ("ViTForImageClassification", "ViTConfig", _VIT),
    "mamba": ("MambaForCausalLM", "MambaConfig", {**_COMMON, **_TOKENS, "state_size": 4}),
}
GENERATORS = {"gpt2": 3, "llama": 3, "t5": 3, "mamba": 2}
"""Name -> graphs of a compiled forward in a decode loop."""


def make(name):
    model_class, config_class, settings = MODELS[name]
    library = importlib.import_module("transformers")
    torch.manual_seed(0)
    return getattr(library, model_class)(getattr(library, config_class)(**settings)).eval()


def inputs_of(name):
    torch.manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, VOCABULARY, (2, 9))
    return {"input_ids": ids, "labels": ids.clone()}


def eager_backend(graph, inputs):
    return graph.forward


def close(expected, found):
    torch.testing.assert_close(expected, found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_training_are_one_graph(name):
    model, inputs = make(name), inputs_of(name)
    other = copy.deepcopy(model)
    whole = weft_capture.capture(other, eager_backend, fullgraph=True)
    with torch.no_grad():
        close(model(**inputs).logits, whole(**inputs).logits)
    losses = [run(**inputs).loss for run in (model, whole)]
    close(*losses)
    for loss in losses:
        loss.backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        close(one.grad, two.grad)
    assert len(whole._weft_capture.graphs) == 2  # without and with gradients


def generated(model, run):
    ids = inputs_of("gpt2")["input_ids"]
    return run(input_ids=ids, max_new_tokens=5, do_sample=False)


@pytest.mark.parametrize("name", GENERATORS)
def test_decode_loop_with_cache(name):
    model = make(name)
    expected = generated(model, model.generate)
    model.forward = weft_capture.capture(model.forward, eager_backend)
    assert torch.equal(expected, generated(model, model.generate))
    state = model.forward._weft_capture
    assert not state.breaks
    assert len(state.graphs) <= GENERATORS[name]


@pytest.mark.parametrize("name", GENERATORS)
def test_generate_breaks_only_where_it_must(name):
    model = make(name)
    expected = generated(model, model.generate)
    weft.reset()
    whole = weft_capture.capture(model.generate, eager_backend)
    assert torch.equal(expected, generated(model, whole))
    codes = {record.code for record in whole._weft_capture.breaks}
    assert codes <= {"data-dependent-branch", "generator"}
