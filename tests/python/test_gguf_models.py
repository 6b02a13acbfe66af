"""Models that come from GGUF files: dense ones with a quantiser on them, packed modules, and files that are none."""

from __future__ import annotations

import copy
import gc

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from transformers.integrations.gguf.dequant import dequantize
from transformers.integrations.gguf.utils import GgufEmbedding, GgufLinear

import tiny
import tle_torch
from tle_torch import layers, weights

IDS = tiny.tokens(1, 9, vocabulary=100)


def write_gguf(
    path,
    quantization=gguf.GGMLQuantizationType.Q4_1,
    layers=2,
    hidden=64,
    inner=96,
    vocabulary=128,
    architecture="llama",
    change=lambda writer: None,
    shapes=(),
):
    """A random Llama with a byte-level tokenizer of `vocabulary` tokens. `change` may change the writer before it
    writes; `shapes` are (tensor, shape) that replace the right ones."""
    random = np.random.default_rng(0)
    shapes = dict(shapes)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // 4)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{i}>" if i < 3 else chr(0x100 + i) for i in range(vocabulary)])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([3] * 3 + [1] * (vocabulary - 3))
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name, *shape, norm=False):
        shape = shapes.get(name, shape)
        if norm:
            writer.add_tensor(name, (1 + 0.2 * random.standard_normal(shape)).astype(np.float32))
            return
        weight = (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(weight, quantization), raw_dtype=quantization)

    add("token_embd.weight", vocabulary, hidden)
    for i in range(layers):
        for name, shape in {
            "attn_q": (hidden, hidden),
            "attn_k": (hidden // 2, hidden),
            "attn_v": (hidden // 2, hidden),
            "attn_output": (hidden, hidden),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }.items():
            add(f"blk.{i}.{name}.weight", *shape)
        add(f"blk.{i}.attn_norm.weight", hidden, norm=True)
        add(f"blk.{i}.ffn_norm.weight", hidden, norm=True)
    add("output_norm.weight", hidden, norm=True)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def load(path, dtype=torch.float32):
    return hf.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()


def test_dense_model_with_a_quantizer(tmp_path):
    """transformers de-quantises a Llama's file and leaves a quantiser on the model that it then refuses to save."""
    path = write_gguf(tmp_path / "model.gguf")
    model = load(path)
    assert model.hf_quantizer is not None
    expected = logits(model)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "unpatched")
    patched = copy.deepcopy(model)
    report = tle_torch.patch_model(patched, "bf16")
    assert report.whole_step == {"model": None}
    assert torch.allclose(logits(patched), expected, atol=1e-4)
    patched.save_pretrained(tmp_path / "saved")
    assert patched.hf_quantizer is not None
    reloaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.allclose(logits(reloaded), expected, atol=1e-5)
    tle_torch.unpatch_model(patched)
    tle_torch.patch_model(patched)
    assert (logits(patched) - expected).abs().max() < 0.1 * expected.abs().max()


def test_from_gguf(tmp_path):
    path = write_gguf(tmp_path / "model.gguf")
    model, tokenizer = tle_torch.from_gguf(path, "w8a8", dtype=torch.float32)
    assert len(tokenizer) >= 128 and model.tle_patch.report.scheme == "w8a8"
    reference = load(path)
    assert (logits(model) - logits(reference)).abs().max() < 0.1 * logits(reference).abs().max()
    unquantised, _ = tle_torch.from_gguf(str(path), "bf16", dtype=torch.float32)
    assert torch.allclose(logits(unquantised), logits(reference), atol=1e-4)


def without(key):
    return lambda writer: writer.kv_data[0].pop(key)


def having(key, value):
    """A metadata entry that is there already, with another value."""

    def change(writer):
        writer.kv_data[0][key].value = value

    return change


def without_tensor(name):
    return lambda writer: writer.tensors[0].pop(name)


def with_tensor(name, *shape):
    return lambda writer: writer.add_tensor(name, np.ones(shape, np.float32))


def renamed(old, new):
    def change(writer):
        writer.tensors[0][new] = writer.tensors[0].pop(old)

    return change


@pytest.mark.parametrize(
    "options, words",
    [
        ({"architecture": "foo"}, "transformers cannot load its architecture 'foo'"),
        ({"change": without("llama.block_count")}, "the metadata lack llama.block_count"),
        (
            {"change": having("llama.attention.head_count", 0)},
            "the metadata's num_attention_heads is 0, which a llama model cannot have",
        ),
        ({"change": having("llama.block_count", 0)}, "the metadata's num_hidden_layers is 0"),
        (
            {"change": having("llama.block_count", 2**31)},
            "the metadata say 2147483648 layers, and the file has 20 tensors",
        ),
        (
            {"architecture": "foo", "change": having("foo.block_count", 2**31)},
            "the metadata say 2147483648 layers, and the file has 20 tensors",
        ),
        (
            {"change": having("llama.attention.head_count", 6)},
            "6 attention heads, and the embeddings' 64 are no multiple",
        ),
        (
            {"change": having("llama.attention.head_count_kv", 3)},
            "4 attention heads are no multiple of the 3 of keys and values",
        ),
        ({"change": without("tokenizer.ggml.tokens")}, "the file has no tokenizer"),
        (
            {"change": having("tokenizer.ggml.tokens", ["a", "b", "c"])},
            "the vocabulary has 3 tokens, and token_embd.weight 128 rows",
        ),
        (
            {"shapes": {"token_embd.weight": (127, 64)}.items()},
            "the vocabulary has 128 tokens, and token_embd.weight 127 rows",
        ),
        (
            {"shapes": {"token_embd.weight": (128, 32)}.items()},
            "token_embd.weight has the shape .128, 32., and the metadata say .128, 64.",
        ),
        (
            {"shapes": {"blk.1.ffn_down.weight": (64, 64)}.items()},
            "blk.1.ffn_down.weight has the shape .64, 64., .* say .64, 96.",
        ),
        (
            {"shapes": {"blk.0.attn_norm.weight": (32,)}.items()},
            "blk.0.attn_norm.weight has the shape .32., .* say .64.",
        ),
        ({"change": without_tensor("token_embd.weight")}, "the file has no token_embd.weight"),
        (
            {"change": without_tensor("blk.1.attn_q.weight")},
            "the file has no values for model.layers.1.self_attn.q_proj.weight",
        ),
        # A tensor of another name: the file goes through transformers.
        (
            {"change": renamed("blk.1.attn_q.weight", "blk.1.attn_x.weight")},
            "the file has no values for model.layers.1.self_attn.q_proj.weight",
        ),
        (
            {"shapes": {"blk.1.ffn_down.weight": (64, 64)}.items(), "change": with_tensor("blk.0.more.weight", 64)},
            "transformers cannot load its architecture 'llama'",
        ),
        (
            {"change": with_tensor("blk.2.attn_norm.weight", 64)},
            "blk.2.attn_norm.weight belongs to model.layers.2.input_layernorm",
        ),
        (
            {"change": with_tensor("blk.0.attn_q.bias", 64)},
            "blk.0.attn_q.bias belongs to model.layers.0.self_attn.q_proj.bias, .* not have",
        ),
    ],
)
def test_files_that_are_no_model(tmp_path, options, words):
    path = write_gguf(tmp_path / "model.gguf", **options)
    with pytest.raises(ValueError, match=words) as caught:
        tle_torch.from_gguf(path)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("model.gguf: ")


def test_weights_that_are_missing_are_not_made_up(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", change=without_tensor("blk.1.attn_q.weight"))
    with pytest.raises(ValueError, match="no values for model.layers.1.self_attn.q_proj.weight"):
        tle_torch.from_gguf(path, "w8a8")


def test_a_file_that_is_no_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"ggml and more")
    with pytest.raises(ValueError, match="is no GGUF file"):
        tle_torch.from_gguf(path)
    with pytest.raises(FileNotFoundError):
        tle_torch.from_gguf(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match="unknown scheme"):
        tle_torch.from_gguf(path, "w9a9")


def packed_linear(rows, columns, quantization, bias=False, permutation=None, seed=0):
    """transformers' module that holds GGUF blocks, and the float weight that the blocks stand for."""
    weight = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    module = GgufLinear(columns, rows, int(quantization), bias)
    module.weight.data = torch.from_numpy(gguf.quants.quantize(weight, quantization).copy())
    if bias:
        module.bias.data = torch.randn(rows)
    module.input_permutation = permutation
    return module, dequantize(module.weight, int(quantization)).reshape(rows, columns)


BLOCKS = {"Q4_0": "w4a8-g32", "Q4_1": "w4a8-g32-asym", "Q8_0": "w8a8-g32"}


@pytest.mark.parametrize("permuted", [None, "heads", "columns"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("quantization", BLOCKS)
@pytest.mark.parametrize("scheme", ["w8a8", "bf16"])
def test_packed_modules_are_taken_over(quantization, bias, permuted, scheme):
    """With the very codes; also if columns are permuted by whole groups of 32, as Qwen3.5's value heads are."""
    generator = torch.Generator().manual_seed(4)
    permutation = {
        None: None,
        "heads": (torch.randperm(4, generator=generator)[:, None] * 32 + torch.arange(32)).flatten(),
        "columns": torch.randperm(128, generator=generator),
    }[permuted]
    module, weight = packed_linear(48, 128, gguf.GGMLQuantizationType[quantization], bias, permutation)
    x = torch.randn(12, 128, generator=torch.Generator().manual_seed(5))  # above MAX_GEMV_ROWS: transformers unpacks
    expected = module(x)
    natural = weight if permutation is None else weight[:, torch.argsort(permutation)]
    model = torch.nn.Sequential(module)
    if permuted == "columns" and scheme == "bf16":
        with pytest.raises(ValueError, match="GGUF blocks need a packed scheme"):
            tle_torch.patch_model(model, scheme)
        return
    report = tle_torch.patch_model(model, scheme, keep_original=True)
    assert report.replaced[0].original == "GgufLinear" and isinstance(model[0], layers.QuantizedLinear)
    assert model[0].weight.dtype == torch.float32
    assert (model(x) - expected).abs().max() < 0.03 * expected.abs().max()
    error = (model[0].dequantized() - natural).abs().amax(1)
    if permuted == "columns":  # scales would have to follow single columns: quantised again
        assert model[0].tle_scheme == "w8a8"
        assert (error <= natural.abs().amax(1) * (0.5 / 127 + 1e-6)).all()
    else:
        assert model[0].tle_scheme == BLOCKS[quantization] and f"{quantization} blocks" in report.replaced[0].scheme
        assert (error <= 2.0**-22 * natural.abs().amax(1)).all()
        assert quantization == "Q4_1" or not error.any()
    assert torch.equal(model[0].float_weight(), model[0].dequantized())
    tle_torch.unpatch_model(model)
    assert type(model[0]) is GgufLinear and torch.equal(model(x), expected)
    tle_torch.patch_model(model, scheme)
    tle_torch.unpatch_model(model, dequantize=True)
    assert type(model[0]) is torch.nn.Linear and (model(x) - expected).abs().max() < 0.02 * expected.abs().max()


def test_packed_modules_that_no_scheme_holds():
    """Q6_K goes to 8 bits by groups of 32, whatever the scheme of float weights."""
    raw = torch.randint(0, 256, (48, 210), dtype=torch.uint8, generator=torch.Generator().manual_seed(6))
    raw[:, 208:] = torch.tensor(np.full(48, 1e-3, np.float16).view(np.uint8).reshape(48, 2))
    module = GgufLinear(256, 48, int(gguf.GGMLQuantizationType.Q6_K))
    module.weight.data = raw
    weight = dequantize(raw, int(gguf.GGMLQuantizationType.Q6_K)).reshape(48, 256)
    model = torch.nn.Sequential(module)
    report = tle_torch.patch_model(model, "w4a8-g32")
    assert model[0].tle_scheme == "w8a8-g32" and "Q6_K blocks, quantised again" in report.replaced[0].scheme
    groups = weight.view(48, 8, 32)
    error = (model[0].dequantized().view(48, 8, 32) - groups).abs()
    assert (error <= groups.abs().amax(-1, keepdim=True) * (0.5 / 127 + 2.0**-21)).all()


def test_packed_modules_inside_a_known_family():
    """A Llama whose Linears hold blocks runs a whole step in one call, like any other."""
    model = tiny.build("llama")
    dense = copy.deepcopy(model)
    for index, (name, linear) in enumerate(list(model.model.named_modules())):
        if isinstance(linear, torch.nn.Linear):
            module, weight = packed_linear(
                linear.out_features, linear.in_features, gguf.GGMLQuantizationType.Q8_0, seed=index
            )
            model.model.set_submodule(name, module)
            dense.model.get_submodule(name).weight.data = weight
    report = tle_torch.patch_model(model)
    assert report.whole_step == {"model": None}
    assert sum(r.original == "GgufLinear" for r in report.replaced) == 21
    # Quantising the values of Q8_0 by the same groups gives its codes again.
    tle_torch.patch_model(dense, "w8a8-g32")
    assert tiny.same_bits(logits(model), logits(dense))


@pytest.mark.parametrize("keep", [False, True])
def test_a_packed_embedding_and_the_head_that_is_tied_to_it(keep):
    """Both take one table over; with the originals kept the embedding goes on reading its blocks."""
    model = tiny.build("llama")
    rows, columns = model.lm_head.weight.shape
    head, _ = packed_linear(rows, columns, gguf.GGMLQuantizationType.Q4_1)
    embedding = GgufEmbedding(rows, columns, int(gguf.GGMLQuantizationType.Q4_1), torch.float32)
    embedding.weight = head.weight
    model.lm_head, model.model.embed_tokens = head, embedding
    blocks, expected = head.weight.numel(), logits(model)
    report = tle_torch.patch_model(model, "bf16", keep_original=keep)
    assert isinstance(model.lm_head, layers.QuantizedLinear)
    assert (logits(model) - expected).abs().max() < 0.05 * expected.abs().max()
    if keep:
        assert type(model.model.embed_tokens) is GgufEmbedding
        assert any(m.reason == "its blocks are the original to keep" for m in report.left_alone)
        tle_torch.unpatch_model(model)
        assert type(model.lm_head) is GgufLinear and torch.equal(logits(model), expected)
        return
    assert isinstance(model.model.embed_tokens, layers.PackedEmbedding)
    assert model.model.embed_tokens.packed is model.lm_head.packed
    assert sum(r.bytes_before for r in report.replaced if r.original.startswith("Gguf")) == blocks
    tle_torch.unpatch_model(model, dequantize=True)
    assert type(model.lm_head) is torch.nn.Linear and type(model.model.embed_tokens) is torch.nn.Embedding
    assert torch.allclose(logits(model), expected, atol=1e-3)


def test_collection_that_is_interrupted_leaves_nothing_frozen(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    assert gc.get_freeze_count() == 0
    monkeypatch.setattr(gc, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        weights.trim_heap()
    assert gc.get_freeze_count() == 0
