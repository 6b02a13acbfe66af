"""The command line."""

from __future__ import annotations

import io

import pytest
import torch
import transformers as hf

import tiny
import tle_torch
from tle_torch import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer that has a chat template."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}w3 {{ m.content }} w4 {% else %}{{ m.content }} {% endif %}"
        "{% endfor %}"
    )
    tokenizer.save_pretrained(path)
    tiny.build("llama", torch.bfloat16).save_pretrained(path)
    (path / "few.txt").write_text("w5 w6")
    (path / "text.txt").write_text(" ".join(f"w{3 + i % 150}" for i in range(100)))
    return path


def test_info(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert "isa: " + tle_torch.cpu_info()["isa"] in text and "linear_w8" in text and torch.__version__ in text


@pytest.mark.parametrize("raw", [[], ["--raw"]])
def test_generate(folder, capsys, raw):
    assert cli.main(["generate", str(folder), "w5 w6", "--max-new-tokens", "7", "--report", *raw]) == 0
    text = capsys.readouterr().out
    assert "Replaced" in text and "7 tokens in" in text
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    tle_torch.patch_model(model)
    prompt = "w5 w6" if raw else "w3 w5 w6 w4"
    output = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=7, do_sample=False)
    answer = tokenizer.decode(output[0, len(prompt.split()) :], skip_special_tokens=True)
    assert "".join(answer.split()) in "".join(text.split())


def test_calibration(folder, capsys):
    calibrated = ["--calibration", str(folder / "text.txt"), "--report"]
    assert cli.main(["generate", str(folder), "w5 w6", "--max-new-tokens", "3", *calibrated]) == 0
    assert "Equalised by 96 calibration tokens" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--kv-dtype", "int8"]])
def test_chat_reuses_the_cache_and_says_the_same(folder, capsys, monkeypatch, options):
    lines = iter(["w5 w6", "w7", ""])
    monkeypatch.setattr(cli, "_read_line", lambda console: next(lines))
    fed, kept = [], []
    original = tle_torch.decode._step

    def step(hidden, plan, keys, *rest):
        fed.append(hidden.shape[1])
        kept.append(keys[0].dtype)
        return original(hidden, plan, keys, *rest)

    monkeypatch.setattr(tle_torch.decode, "_step", step)
    assert cli.main(["chat", str(folder), "--max-new-tokens", "5", *options]) == 0
    text = capsys.readouterr().out
    # Second turn: its three tokens and the last answered one, whose key the cache does not have yet.
    assert [n for n in fed[2:] if n > 1] == [4, 4]
    # Before that: two steps of the self-check, and two, with a plain cache, that show what the logits are.
    assert set(kept[4:]) == {torch.int8 if options else torch.bfloat16}
    assert text.count("tok/s") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "/nowhere/at/all/model", "w5"], "no file or folder /nowhere/at/all/model"),
        (["generate", "elsewhere.gguf", "w5"], "no file or folder elsewhere.gguf"),
        (["generate", "{folder}/..", "w5"], ""),
        (["generate", "{folder}", "", "--raw"], "the prompt is empty"),
        (["generate", __file__, "w5"], "no GGUF file"),
        (["generate", "{folder}", "w5", "--scheme", "w3"], "unknown scheme"),
        (["generate", __file__, "w5", "--calibration", __file__], "is quantised already"),
        (["generate", "{folder}", "w5", "--calibration", "{folder}/few.txt"], "few.txt has 2 tokens"),
        (["--threads", "0", "info"], "at least 1"),
        (["--threads", "513", "info"], "must be in 1 .. 512"),
    ],
)
def test_what_the_user_got_wrong_is_one_line(folder, capsys, arguments, message):
    assert cli.main([a.format(folder=folder) for a in arguments]) == 2
    error = capsys.readouterr().err
    *_, last = error.splitlines()
    assert last.startswith("tle-torch: ") and message in last


@pytest.mark.parametrize("count", ["0", "-3", "many"])
def test_numbers_are_checked_before_anything_is_loaded(capsys, count):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", "/nowhere", "w5", "--max-new-tokens", count])
    assert "--max-new-tokens" in capsys.readouterr().err


def test_prompt_from_standard_input(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("w9 w8"))
    assert cli.main(["generate", str(folder), "-", "--raw", "--max-new-tokens", "3"]) == 0
    assert "3 tokens in" in capsys.readouterr().out
