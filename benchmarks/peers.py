"""The projects that benchmarks/speed.py compares with: their installation, their files, and how to run them.

    python benchmarks/peers.py                        what is installed
    python benchmarks/peers.py llama.cpp              builds and installs it (10 to 30 minutes), once
    python benchmarks/peers.py onnxruntime-genai      installs it
    python benchmarks/peers.py torchao                installs it

Each peer has a virtual environment of its own in the folder that TLE_CACHE names (default: .cache in the clone), so
that none can change what this project runs with. The classes at the end run inside those environments:
benchmarks/contender.py imports this file there, and nothing else of the project but scripts/fetch.py, so only the
standard library is imported above.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import fetch  # noqa: E402

CONSTRAINTS = ROOT / "scripts" / "requirements" / "constraints.txt"
# What pip installs into a peer's environment, one call after the other (torch by itself and first, as everywhere).
# llama.cpp is compiled here and now: a wheel that pip kept may be of another compiler or with other flags.
INSTALL = {
    "llama.cpp": [["numpy", "typing_extensions", "diskcache", "jinja2", "scikit-build-core", "cmake", "ninja"],
                  ["--no-build-isolation", "--no-cache-dir", "llama-cpp-python"]],
    "onnxruntime-genai": [["torch"], ["transformers", "onnx_ir", "onnxruntime-genai"]],
    "torchao": [["torch"], ["transformers", "accelerate", "gguf"], ["--no-deps", "torchao"]],
}
# The prefix of a contender's name, and the peer whose environment it runs in.
CONTENDERS = {"llama": "llama.cpp", "ort": "onnxruntime-genai", "torchao": "torchao"}


def folder(peer: str) -> Path:
    return fetch.cache_dir() / "peers" / peer


def python(peer: str) -> Path:
    """The interpreter of a peer's environment."""
    return folder(peer) / "bin" / "python"


def installed(peer: str) -> bool:
    return (folder(peer) / "installed").exists()


def install(peer: str) -> None:
    where = folder(peer)
    subprocess.run([sys.executable, "-m", "venv", str(where)], check=True)
    # llama.cpp compiled for this very CPU, as its users are told to; with what GCC 12 gets wrong about AMX put right.
    flags = os.environ.get("CXXFLAGS", "")
    if platform.machine() == "x86_64":
        header = Path(__file__).resolve().with_name("gcc12_amx.h")
        flags = f'{flags} -include "{header}"'.strip()
    environment = {**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": "2",
                   "CXXFLAGS": flags, "PATH": f"{where / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    for packages in INSTALL[peer]:
        command = [str(where / "bin" / "pip"), "install", "-c", str(CONSTRAINTS), *packages]
        subprocess.run(command, check=True, env=environment)
    (where / "installed").touch()


# ---- Files ----


def gguf_file(model: str, bits: str) -> Path:
    """A model of benchmarks/models.py as a GGUF file of llama.cpp's type `bits` (Q4_0, Q4_1 or Q8_0).

    SmolLM2's own file is Q4_1, and the others are made from it; the random models are written as F16 first. llama.cpp
    does the quantising: this runs in its environment, and calls this project's for the F16 file.
    """
    if model == "smollm2" and bits == "Q4_1":
        return fetch.smollm2_gguf()
    target = folder("files") / f"{model}-{bits}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        source = fetch.smollm2_gguf() if model == "smollm2" else target.with_name(f"{model}-F16.gguf")
        if not source.exists():
            subprocess.run([os.environ["TLE_BENCHMARK_PYTHON"], __file__, "write-f16", model, str(source)], check=True)
        import llama_cpp

        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.nthread = 2
        parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{bits}")
        parameters.allow_requantize = True
        part = target.with_suffix(".part")
        if llama_cpp.llama_model_quantize(str(source).encode(), str(part).encode(), ctypes.byref(parameters)) != 0:
            raise RuntimeError(f"llama.cpp could not quantise {source}")
        part.rename(target)
    return target


def write_f16(name: str, target: Path) -> None:
    """A random model of benchmarks/models.py as an F16 GGUF file without a vocabulary.

    llama.cpp wants the rows of a Llama model's q and k interleaved for its rotary embedding; the rows of random weights
    are left as they are, which changes what the model says but not how long it takes.
    """
    import gguf
    import models
    import torch

    model = models.load(name, torch.float16)
    config = model.config
    architecture = {"llama": "llama", "qwen3": "qwen3"}[config.model_type]
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, architecture)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    theta = config.rope_parameters["rope_theta"]
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for key, value in model.state_dict().items():
        if key == "lm_head.weight":
            continue  # tied to the embedding
        to = names.get_name(key, try_suffixes=(".weight", ".bias"))
        wide = value.dim() > 1
        writer.add_tensor(to, (value if wide else value.float()).numpy())
    if config.rope_parameters["rope_type"] != "default":
        # What each frequency is divided by; where the type is "default" llama.cpp needs nothing.
        plain = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.base_model.rotary_emb.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)


def genai_folder(model: str) -> Path:
    """A model of benchmarks/models.py as onnxruntime-genai's int4 model (blocks of 32, int8 activations, int4 head),
    made by its own builder."""
    target = folder("files") / f"{model}-genai-int4"
    if not target.exists():
        hf = folder("files") / f"{model}-hf"
        if not hf.exists():
            subprocess.run([os.environ["TLE_BENCHMARK_PYTHON"], __file__, "write-hf", model, str(hf)], check=True)
        part = target.with_suffix(".part")
        subprocess.run([sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(hf), "-o", str(part), "-p",
                        "int4", "-e", "cpu", "-c", str(folder("files") / "hf-cache"), "--extra_options",
                        "int4_block_size=32", "int4_accuracy_level=4"], check=True)
        part.rename(target)
    return target


def write_hf(name: str, target: Path) -> None:
    """A model of benchmarks/models.py with SmolLM2's tokenizer as a Hugging Face folder, which converters read."""
    import models
    import torch
    from transformers import AutoTokenizer

    models.load(name, torch.float32).save_pretrained(target)
    AutoTokenizer.from_pretrained(models.fetched("smollm2-hf")).save_pretrained(target)


# ---- Contenders (benchmarks/contender.py says what each method gives) ----


def prompt(length: int) -> list[int]:
    return [100 + (7919 * i + length) % 40000 for i in range(length)]


class LlamaCpp:
    """llama.cpp through the C functions that llama-cpp-python binds: nothing of its Python classes is timed."""

    def __init__(self, bits: str):
        self.bits = bits.upper()

    def load(self, model: str, threads: int) -> dict:
        import llama_cpp
        import numpy

        self.library, self.numpy = llama_cpp, numpy
        self.silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.silent, ctypes.c_void_p(0))
        path = gguf_file(model, self.bits)
        start = time.perf_counter()
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = 8192 + 256, 2048, 512
        parameters.n_threads = parameters.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        load_s = time.perf_counter() - start
        self.states = {}
        kv = llama_cpp.llama_model_n_layer(self.model) * llama_cpp.llama_model_n_head_kv(self.model) * self.head_dim()
        return {"load_s": load_s, "bytes": llama_cpp.llama_model_size(self.model), "kv_bytes": 2 * 2 * kv}  # fp16

    def metadata(self, key: str) -> str | None:
        """A value of the file, as text."""
        text = ctypes.create_string_buffer(256)
        length = self.library.llama_model_meta_val_str(self.model, key.encode(), text, len(text))
        return None if length < 0 else text.value.decode()

    def head_dim(self) -> int:
        given = self.metadata(f"{self.metadata('general.architecture')}.attention.key_length")
        return int(given or self.library.llama_model_n_embd(self.model) // self.library.llama_model_n_head(self.model))

    def feed(self, tokens: list[int]) -> None:
        array = (self.library.llama_token * len(tokens))(*tokens)
        if self.library.llama_decode(self.context, self.library.llama_batch_get_one(array, len(tokens))) != 0:
            raise RuntimeError("llama_decode failed")

    def most_likely(self) -> int:
        logits = self.library.llama_get_logits_ith(self.context, -1)
        return int(self.numpy.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def read(self, tokens: list[int]) -> None:
        self.library.llama_memory_clear(self.memory, True)
        for first in range(0, len(tokens), 2048):
            self.feed(tokens[first : first + 2048])

    def to_context(self, length: int) -> None:
        """The cache filled with `length` tokens. They are read once and then restored: reading a long prompt takes
        longer than all the rest."""
        if length not in self.states:
            self.read(prompt(length))
            size = self.library.llama_state_seq_get_size(self.context, 0)
            self.states[length] = (ctypes.c_uint8 * size)()
            self.library.llama_state_seq_get_data(self.context, self.states[length], size, 0)
        self.library.llama_memory_clear(self.memory, True)
        state = self.states[length]
        if self.library.llama_state_seq_set_data(self.context, state, len(state), 0) == 0:
            raise RuntimeError("llama_state_seq_set_data failed")

    def decode(self, context: int, tokens: int) -> dict:
        self.to_context(context)
        self.feed([100])
        start = time.perf_counter()
        for _ in range(tokens):
            self.feed([self.most_likely()])
        seconds = time.perf_counter() - start
        return {"tok_s": tokens / seconds}

    def prefill(self, tokens: int) -> dict:
        start = time.perf_counter()
        self.read(prompt(tokens))
        self.most_likely()
        return {"tok_s": tokens / (time.perf_counter() - start)}

    def logits(self, windows: str, target: str) -> dict:
        rows = self.numpy.load(windows)
        library, length = self.library, rows.shape[1]
        logits = self.numpy.empty((rows.size, self.vocabulary), dtype=self.numpy.float32)
        batch = library.llama_batch_init(length, 0, 1)
        for w, row in enumerate(rows):
            library.llama_memory_clear(self.memory, True)
            batch.n_tokens = length
            for i, token in enumerate(row):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), i, 1, 1
                batch.seq_id[i][0] = 0
            if library.llama_decode(self.context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            for i in range(length):
                at = library.llama_get_logits_ith(self.context, i)
                logits[w * length + i] = self.numpy.ctypeslib.as_array(at, (self.vocabulary,))
        library.llama_batch_free(batch)
        self.numpy.save(target, logits)
        return {}


class OnnxRuntimeGenAI:
    """onnxruntime-genai's own generator loop, greedy."""

    def load(self, model: str, threads: int) -> dict:
        import json

        import numpy
        import onnxruntime_genai as og

        self.library, self.numpy = og, numpy
        path = genai_folder(model)
        start = time.perf_counter()
        config = og.Config(str(path))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self.model = og.Model(config)
        self.kept = None
        load_s = time.perf_counter() - start
        sizes = json.loads((path / "genai_config.json").read_text())["model"]["decoder"]
        weights = sum(p.stat().st_size for p in path.glob("*.data"))  # one int4 table: head and embedding
        return {"load_s": load_s, "bytes": weights,
                "kv_bytes": 2 * 4 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_size"]}

    def generator(self, tokens: list[int], more: int):
        parameters = self.library.GeneratorParams(self.model)
        parameters.set_search_options(max_length=len(tokens) + more, min_length=len(tokens) + more, do_sample=False)
        generator = self.library.Generator(self.model, parameters)
        generator.append_tokens(self.numpy.array([tokens], dtype=self.numpy.int32))
        return generator

    def decode(self, context: int, tokens: int) -> dict:
        key = (context, tokens)
        if self.kept != key:  # the prompt is read once and then rewound to: that takes longer than all the rest
            self.kept, self.running = None, None
            self.running, self.kept = self.generator(prompt(context), tokens + 2), key
        else:
            self.running.rewind_to(context)
        generator = self.running
        generator.generate_next_token()
        start = time.perf_counter()
        for _ in range(tokens):
            generator.generate_next_token()
        return {"tok_s": tokens / (time.perf_counter() - start)}

    def prefill(self, tokens: int) -> dict:
        start = time.perf_counter()
        self.generator(prompt(tokens), 2).generate_next_token()
        return {"tok_s": tokens / (time.perf_counter() - start)}

    def logits(self, windows: str, target: str) -> dict:
        rows, logits = self.numpy.load(windows), []
        for row in rows:
            generator = self.generator([int(row[0])], len(row))
            logits.append(generator.get_logits().reshape(-1))
            for token in row[1:]:
                generator.append_tokens(self.numpy.array([[token]], dtype=self.numpy.int32))
                logits.append(generator.get_logits().reshape(-1))
        self.numpy.save(target, self.numpy.stack(logits).astype(self.numpy.float32))
        return {}


def main() -> None:
    if sys.argv[1:2] == ["write-f16"]:
        return write_f16(sys.argv[2], Path(sys.argv[3]))
    if sys.argv[1:2] == ["write-hf"]:
        return write_hf(sys.argv[2], Path(sys.argv[3]))
    for peer in sys.argv[1:]:
        if peer not in INSTALL:
            raise SystemExit(f"unknown peer {peer!r}: {', '.join(INSTALL)}")
        install(peer)
    for peer in INSTALL:
        print(f"{peer}: {'installed' if installed(peer) else 'not installed'}")


if __name__ == "__main__":
    main()
