"""The tokenizer of from_gguf against the one that transformers makes of the same file."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from transformers import AutoConfig, AutoTokenizer

from tle_torch.gguf_file import GgufFile
from tle_torch.gguf_tokenizer import tokenizer_of

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "benchmarks" / "data" / "text.txt").read_text(encoding="utf-8")
CONTROL, BYTE, USER_DEFINED = 3, 6, 4
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "",
    " ",
    "  two  spaces ",
    "\t\ttabs\n\n\nlines\r\n",
    "Hello, world! It's 2024, isn't it? 1234567890",
    "don't DON'T we'll",
    "naïve façade – “quotes” … № ½ ﬁ Ⅷ",
    "Ünïcödé: é vs e\u0301, Å vs A\u030a",
    "日本語のテキスト。中文，한국어 ไทย العربية עברית",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 👍🏽 \ufe0f",
    "zero\u200bwidth\u00a0space\u2028line\ufeff",
    "\x00\x01\x7f control",
    "🜂𝔘𝔫𝔦 𐍈",
    "def f(x: int) -> int:\n    return x**2  # comment\n\n\tif (a&&b||!c) { y += 1; }",
    "<|im_start|>user\nHi<|im_end|>\n<think>a</think>",
    "<|im_start|><|im_end|> <|im_start|> x<|im_end|>y",
    "<s>a</s> <unk> ▁a▁▁b",
    "https://example.org/a?b=c&d=%20#e",
    TEXT[:5000],
]


def write(path, architecture, kind, tokens, types, merges=None, scores=None, pre=None, **ids):
    """A file with a tokenizer and one tensor."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(len(tokens))
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_context_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    writer.add_chat_template(TEMPLATE)
    for name, index in ids.items():
        getattr(writer, f"add_{name}_token_id")(index)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 64), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def byte_level():
    """(tokens, types, merges) of a byte-level BPE in the order of a real one: special tokens, bytes, merges."""
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(
        [TEXT, *TEXTS], vocab_size=700, min_frequency=1, special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    vocabulary = model.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get) + ["<think>", "<tool>"]
    types = [CONTROL] * 2 + [1] * (len(tokens) - 4) + [USER_DEFINED] * 2
    return tokens, types, _merges(model)


@pytest.fixture(scope="module")
def sentencepiece():
    """(tokens, types, merges, scores) of a sentencepiece BPE: specials, bytes, pieces with falling scores."""
    model = tokenizers.SentencePieceBPETokenizer()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    model.train_from_iterator([TEXT, *TEXTS], vocab_size=900, min_frequency=1, special_tokens=special)
    vocabulary = model.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    types = [2, CONTROL, CONTROL] + [BYTE] * 256 + [1] * (len(tokens) - 259)
    return tokens, types, _merges(model), [-float(i) for i in range(len(tokens))]


def _merges(model):
    merges = json.loads(model.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


@pytest.mark.parametrize(
    "architecture, pre",
    [
        ("llama", "smollm"),
        ("llama", "llama-bpe"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen2"),
        ("llama", None),
        ("llama", "tekken"),
    ],
)
def test_byte_level(tmp_path, byte_level, architecture, pre):
    tokens, types, merges = byte_level
    path = write(tmp_path / "m.gguf", architecture, "gpt2", tokens, types, merges, pre=pre, bos=0, eos=1, pad=1)
    assert_same_tokenizer(path, architecture)


@pytest.mark.parametrize("flags", [{}, {"add_bos": False}, {"add_bos": True, "add_eos": True}])
@pytest.mark.parametrize("with_merges", [True, False])
def test_sentencepiece(tmp_path, sentencepiece, with_merges, flags):
    tokens, types, merges, scores = sentencepiece
    original = gguf.GGUFWriter.add_chat_template

    def with_flags(writer, template):
        original(writer, template)
        for flag, value in flags.items():
            getattr(writer, f"add_{flag}_token")(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_chat_template", with_flags)
        path = write(
            tmp_path / "m.gguf",
            "llama",
            "llama",
            tokens,
            types,
            merges if with_merges else None,
            scores,
            bos=1,
            eos=2,
            unk=0,
        )
    ours = assert_same_tokenizer(path, "llama")
    assert (ours("Hello").input_ids[0] == 1) == flags.get("add_bos", True)


def test_smollm2():
    command = [sys.executable, str(ROOT / "scripts" / "fetch.py"), "smollm2"]
    path = Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1])
    ours = assert_same_tokenizer(path, "llama")
    assert ours.eos_token == "<|im_end|>" and len(ours) == 49152


def assert_same_tokenizer(path, architecture):
    """Compares everything that a user sees of the two; returns ours."""
    wanted = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    with GgufFile(path) as file:
        got = tokenizer_of(file, AutoConfig.for_model(architecture))
    assert type(got) is type(wanted)
    assert got.special_tokens_map == wanted.special_tokens_map and got.all_special_ids == wanted.all_special_ids
    assert got.get_vocab() == wanted.get_vocab() and len(got) == len(wanted)
    assert {k: str(v) for k, v in got.added_tokens_decoder.items()} == {
        k: str(v) for k, v in wanted.added_tokens_decoder.items()
    }
    assert got.chat_template == wanted.chat_template and got.padding_side == wanted.padding_side
    for text in TEXTS:
        for special in (True, False):
            ids = wanted(text, add_special_tokens=special).input_ids
            assert got(text, add_special_tokens=special).input_ids == ids, text
            for skip in (True, False):
                assert got.decode(ids, skip_special_tokens=skip) == wanted.decode(ids, skip_special_tokens=skip), text
    chat = [
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "<think>…</think> 42\n"},
    ]
    for options in ({"tokenize": False}, {"return_dict": False}):
        rendered = wanted.apply_chat_template(chat, add_generation_prompt=True, **options)
        assert got.apply_chat_template(chat, add_generation_prompt=True, **options) == rendered
    batches = [t(TEXTS[:8], padding=True) if t.pad_token else t(TEXTS[:8]) for t in (got, wanted)]
    assert batches[0]["input_ids"] == batches[1]["input_ids"]
    return got


def test_saved_and_loaded(tmp_path, byte_level):
    tokens, types, merges = byte_level
    path = write(tmp_path / "m.gguf", "llama", "gpt2", tokens, types, merges, bos=0, eos=1)
    with GgufFile(path) as file:
        tokenizer = tokenizer_of(file, AutoConfig.for_model("llama"))
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert [again(text).input_ids for text in TEXTS] == [tokenizer(text).input_ids for text in TEXTS]


def test_another_models_tokenizer_beside_the_file_is_not_read(tmp_path, byte_level, sentencepiece):
    tokens, types, merges = byte_level
    path = write(tmp_path / "m.gguf", "llama", "gpt2", tokens, types, merges, bos=0, eos=1)
    with GgufFile(path) as file:
        tokenizer = tokenizer_of(file, AutoConfig.for_model("llama"))
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    with GgufFile(path) as file:
        again = tokenizer_of(file, AutoConfig.for_model("llama"))
    assert again.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer"),
        ({"tokenizer.ggml.tokens": []}, "has no tokenizer"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "has no tokenizer"),
        ({"tokenizer.ggml.model": "rwkv"}, "cannot build its tokenizer .of kind 'rwkv'"),
        ({"tokenizer.ggml.model": None}, "cannot build its tokenizer .of kind None"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "the eos token is number 1000000 of a vocabulary"),
        ({"tokenizer.ggml.eos_token_id": -1}, "the eos token is number -1 of a vocabulary"),
        ({"tokenizer.ggml.bos_token_id": "<s>"}, "the bos token is number '<s>' of a vocabulary"),
        ({"tokenizer.ggml.merges": None}, "cannot build its tokenizer"),
        ({"tokenizer.ggml.merges": [1, 2]}, "cannot build its tokenizer"),
        ({"tokenizer.ggml.merges": ["ab"]}, "cannot build its tokenizer"),
        ({"tokenizer.ggml.merges": ["no such"]}, "cannot build its tokenizer"),
    ],
)
def test_bad_input(tmp_path, byte_level, change, words):
    tokens, types, merges = byte_level
    path = write(tmp_path / "m.gguf", "llama", "gpt2", tokens, types, merges, bos=0, eos=1)
    with GgufFile(path) as file:
        for key, value in change.items():
            file.metadata.pop(key, None)
            if value is not None:
                file.metadata[key] = value
        with pytest.raises(ValueError, match=words) as caught:
            tokenizer_of(file, AutoConfig.for_model("llama"))
    assert "\n" not in str(caught.value) and str(caught.value).startswith("m.gguf: ")
