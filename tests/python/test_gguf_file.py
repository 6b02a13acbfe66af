"""Reading GGUF files, and what is said about those that cannot be read."""

import struct

import gguf
import numpy as np
import pytest
import torch

from tle_torch.gguf_file import GgufFile


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


ARCHITECTURE = entry("general.architecture", 8, string("llama"))


def tensor(name="a", shape=(4, 32), kind=0, offset=0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def content(entries=(ARCHITECTURE,), tensors=None, data=512, version=3, count=None) -> bytes:
    tensors = [tensor()] if tensors is None else tensors
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors) if count is None else count, len(entries))
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def opened(tmp_path, data: bytes) -> GgufFile:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    return GgufFile(path)


def test_against_the_gguf_package(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("u8", 200), writer.add_int8("i8", -5), writer.add_uint16("u16", 60000), writer.add_int16("i16", -6)
    (
        writer.add_uint32("u32", 2**32 - 1),
        writer.add_int32("i32", -7),
        writer.add_float32("f32", 1.5),
        writer.add_bool("b", True),
    )
    writer.add_uint64("u64", 2**64 - 1), writer.add_int64("i64", -8), writer.add_float64("f64", 0.1)
    (
        writer.add_string("s", "naïve ▁ 日本"),
        writer.add_array("strings", ["a", "", "ß"]),
        writer.add_array("numbers", [1, 2, 3]),
    )
    writer.add_array("nested", [["a"], ["b", "c"]])
    random = np.random.default_rng(0)
    arrays = {
        "one": random.standard_normal(5),
        "two": random.standard_normal((3, 4)),
        "three": random.standard_normal((2, 3, 4)),
    }
    for name, array in arrays.items():
        writer.add_tensor(name, array.astype(np.float32))
    blocks = gguf.quants.quantize(random.standard_normal((6, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("q", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    with GgufFile(tmp_path / "m.gguf") as file:
        assert file.architecture == "llama"
        wanted = {
            "u8": 200,
            "i8": -5,
            "u16": 60000,
            "i16": -6,
            "u32": 2**32 - 1,
            "i32": -7,
            "f32": 1.5,
            "b": True,
            "u64": 2**64 - 1,
            "i64": -8,
            "f64": 0.1,
            "s": "naïve ▁ 日本",
            "strings": ["a", "", "ß"],
            "numbers": [1, 2, 3],
            "nested": [["a"], ["b", "c"]],
        }
        metadata = dict(file.metadata)
        metadata["strings"] = list(metadata["strings"])
        metadata["nested"] = [list(strings) for strings in metadata["nested"]]
        assert {key: metadata[key] for key in wanted} == wanted
        assert [(t.name, t.shape, t.type) for t in file.tensors.values()] == [
            ("one", (5,), "F32"),
            ("two", (3, 4), "F32"),
            ("three", (2, 3, 4), "F32"),
            ("q", (6, 64), "Q4_1"),
        ]
        for name, array in arrays.items():
            got = file.bytes_of(file.tensors[name]).clone().view(torch.float32).numpy()
            assert np.array_equal(got.reshape(array.shape), array.astype(np.float32))
        q = file.tensors["q"]
        assert np.array_equal(file.bytes_of(q).numpy(), blocks.reshape(-1))
        file.release()
        assert np.array_equal(file.bytes_of(q).numpy(), blocks.reshape(-1))


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "is no GGUF file"),
        (b"GGU", "is no GGUF file"),
        (b"ggml and more", "is no GGUF file"),
        (bytes(100), "is no GGUF file"),
        (b"GGUF", "cut off in its header"),
        (content(version=1), "GGUF version 1 cannot be read, only 2 and 3"),
        (content(version=4), "GGUF version 4 cannot be read"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(100), "the file is big-endian"),
        (content(tensors=[]), "the file holds no tensors"),
        (content(count=2**60), "tensor .. has 0 dimensions: the file is damaged"),
        (content(entries=[]), "do not name an architecture"),
        (content(entries=[entry("general.architecture", 4, struct.pack("<I", 3))]), "do not name an architecture"),
        (content(entries=[ARCHITECTURE, ARCHITECTURE]), "have 'general.architecture' twice"),
        (content(entries=[ARCHITECTURE, entry("x", 77, b"")]), "'x' is of the unknown type 77"),
        (content(entries=[ARCHITECTURE, entry("x", 9, struct.pack("<IQ", 77, 5))]), "'x' is of the unknown type 77"),
        (
            content(entries=[ARCHITECTURE, entry("x", 9, struct.pack("<IQ", 4, 2**62))]),
            "cut off in its header, or damaged",
        ),
        (
            content(entries=[ARCHITECTURE, entry("x", 9, struct.pack("<IQ", 8, 2**62))]),
            "cut off in its header, or damaged",
        ),
        (
            content(entries=[ARCHITECTURE, entry("x", 9, struct.pack("<IQ", 9, 1) * 5000)]),
            "cut off in its header, or damaged",
        ),
        (
            content(entries=[ARCHITECTURE, string("x") + struct.pack("<IQ", 8, 2**63)]),
            "cut off in its header, or damaged",
        ),
        (content(entries=[ARCHITECTURE, entry("x", 8, struct.pack("<Q", 2) + b"\xff\xfe")]), "is not UTF-8"),
        (
            content(entries=[ARCHITECTURE, entry("general.alignment", 4, struct.pack("<I", 12))]),
            "general.alignment is 12",
        ),
        (content(tensors=[tensor(kind=99)]), "tensor 'a' is of the unknown type 99"),
        (content(tensors=[tensor(shape=())]), "tensor 'a' has 0 dimensions"),
        (content(tensors=[tensor(shape=(1,) * 5)]), "tensor 'a' has 5 dimensions"),
        (content(tensors=[tensor(shape=(0, 32))]), "has the shape .0, 32., which blocks of 1"),
        (
            content(tensors=[tensor(shape=(4, 40), kind=2)]),
            "has the shape .4, 40., which blocks of 32 .Q4_0. cannot have",
        ),
        (content(tensors=[tensor(), tensor()]), "the file has tensor 'a' twice"),
        (content(data=511), "cut off: tensor 'a' ends at byte 640, the file at 639"),
        (content(tensors=[tensor(offset=2**63)]), "cut off: tensor 'a' ends at byte"),
    ],
)
def test_bad_input(tmp_path, data, words):
    with pytest.raises(ValueError, match=words) as caught:
        opened(tmp_path, data)
    assert "\n" not in str(caught.value) and "m.gguf" in str(caught.value)


def test_every_cut_is_an_error(tmp_path):
    """Whatever byte a file ends at, it is said."""
    data = content(entries=[ARCHITECTURE, entry("x", 9, struct.pack("<IQ", 8, 2) + string("ab") + string("c"))])
    with opened(tmp_path, data) as file:
        assert list(file.metadata["x"]) == ["ab", "c"]
    for length in range(len(data)):
        with pytest.raises(ValueError, match="is no GGUF file|cut off"):
            opened(tmp_path, data[:length])


def test_a_string_of_an_array_that_is_not_utf8(tmp_path):
    strings = struct.pack("<IQ", 8, 2) + string("ab") + struct.pack("<Q", 2) + b"\xff\xfe"
    with opened(tmp_path, content(entries=[ARCHITECTURE, entry("x", 9, strings)])) as file:
        assert len(file.metadata["x"]) == 2 and list(file.tensors) == ["a"]
        with pytest.raises(ValueError, match="^m.gguf: a string of the header is not UTF-8: the file is damaged$"):
            list(file.metadata["x"])


def test_an_error_while_data_are_read_is_what_comes_out(tmp_path):
    with pytest.raises(ValueError, match="something is wrong with it"):
        with opened(tmp_path, content()) as file:
            data = file.bytes_of(file.tensors["a"])
            raise ValueError("something is wrong with it")
    assert data.numel() == 512  # still mapped, since it is still held


def test_no_file(tmp_path):
    with pytest.raises(TypeError):
        GgufFile(7)
    for path in (tmp_path, tmp_path / "m.gguf"):
        with pytest.raises(FileNotFoundError, match="there is no file"):
            GgufFile(path)
