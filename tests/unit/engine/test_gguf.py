# SPDX-License-Identifier: Apache-2.0
"""PN weights in GGUF files: quantizing, reading back, refusals, and the bounded reader."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _gguf

from engine.pn import __main__ as cli
from engine.pn import convert, gguf, mix, tensors
from engine.pn import format as pn
from tests.pn import reorder

RNG = np.random.default_rng(5)
NAMES = {
    "token_embd.weight": (80, 16),
    "blk.0.attn_q.weight": (320, 8),
    "blk.0.ffn_down.weight": (192, 6),
    "blk.0.attn_norm.weight": (320,),
}


def make(
    path: Path, types: dict[str, str] | None = None, values: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """A small file of F32 tensors (or of the types given); returns its values."""
    made = {n: RNG.standard_normal(s[::-1]).astype(np.float32) for n, s in NAMES.items()} | (values or {})
    pairs = {
        "general.architecture": gguf.string_value("llama"),
        "tokenizer.ggml.tokens": struct.pack("<IIQ", 9, 8, 2)
        + b"".join(struct.pack("<Q", 2) + t for t in (b"ab", b"cd")),
        "odd.bool": struct.pack("<I?", 7, True),
    }
    kinds = {n: (types or {}).get(n, "f32") for n in NAMES}

    def fill(i: int, stream) -> None:  # type: ignore[no-untyped-def]
        name = list(NAMES)[i]
        x = made[name]
        if kinds[name] == "bf16":
            stream.write((x.view(np.uint32) >> 16).astype("<u2").tobytes())
        else:
            stream.write(x.astype("<f2" if kinds[name] == "f16" else "<f4").tobytes())

    gguf.write(path, pairs, [(n, s, gguf.IDS[kinds[n]]) for n, s in NAMES.items()], fill)
    return made


def load(path: Path) -> dict[str, np.ndarray]:
    file = gguf.read(path)
    return {t.name: np.array(tensors.weights(file, t, file.data(t), 0, t.count // t.row)) for t in file.tensors}


@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
def test_quantize_and_read_back(tmp_path: Path, source: str) -> None:
    values = make(tmp_path / "a.gguf", {"blk.0.attn_q.weight": source})
    counts = convert.quantize(tmp_path / "a.gguf", tmp_path / "pn.gguf", mix.load("smallest"))
    assert counts == {"f32": 2, "pn3t": 1, "pn4t": 1}
    before, after = gguf.read(tmp_path / "a.gguf"), gguf.read(tmp_path / "pn.gguf")
    assert {k: v for k, v in after.pairs.items() if not k.startswith("tensorless.")} == before.pairs
    assert after.value("tensorless.pn.rotation") == "none"
    read = load(tmp_path / "pn.gguf")
    assert np.array_equal(read["token_embd.weight"], values["token_embd.weight"])
    x = load(tmp_path / "a.gguf")["blk.0.attn_q.weight"]
    assert np.array_equal(read["blk.0.attn_q.weight"], pn.decode(pn.PN3T, pn.quantize(pn.PN3T, x)).reshape(8, 320))
    convert.dequantize(tmp_path / "pn.gguf", tmp_path / "f32.gguf")
    for name, value in load(tmp_path / "f32.gguf").items():
        assert np.array_equal(value, read[name])
    assert not list(tmp_path.glob("*.part"))


def test_streams_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a.gguf")
    convert.quantize(tmp_path / "a.gguf", tmp_path / "one.gguf", mix.load("smallest"))
    monkeypatch.setattr(tensors, "CHUNK", 321)  # a row or two at a time
    seen = []
    convert.quantize(tmp_path / "a.gguf", tmp_path / "two.gguf", mix.load("smallest"), say=lambda *a: seen.append(a))
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    assert len(seen) > 8
    assert seen[-1][1] == seen[-1][2]


def test_rotation_is_undone(tmp_path: Path) -> None:
    shapes = {"blk.0.attn_q.weight": RNG.standard_normal((8, 320)).astype(np.float32)}
    values = make(tmp_path / "a.gguf", values=shapes)
    (tmp_path / "mix.toml").write_text("[[rule]]\ntensors='blk.0.attn_q.weight'\ntype='pn4t'\n")
    convert.quantize(tmp_path / "a.gguf", tmp_path / "r.gguf", mix.load(str(tmp_path / "mix.toml")), "hadamard-64")
    assert gguf.read(tmp_path / "r.gguf").value("tensorless.pn.rotation") == "hadamard-64"
    convert.dequantize(tmp_path / "r.gguf", tmp_path / "back.gguf")
    back = load(tmp_path / "back.gguf")["blk.0.attn_q.weight"]
    error = np.sqrt(np.mean((back - values["blk.0.attn_q.weight"]) ** 2))
    assert 0.02 < error < 0.12  # pn4t's error on gaussian weights, in other places
    h = tensors.rotate(np.eye(64, dtype=np.float32), 64)
    assert np.allclose(h @ h.T, np.eye(64), atol=1e-6)
    assert np.array_equal(np.sign(h[1]), np.tile([1, -1], 32))  # Sylvester's order


def test_infinite_weight_fails_that_tensor_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = RNG.standard_normal((6, 192)).astype(np.float32)
    x[3, 7] = np.inf
    make(tmp_path / "a.gguf", values={"blk.0.ffn_down.weight": x})
    assert cli.main(["quantize", str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf")]) == 1
    message = capsys.readouterr().err
    assert "blk.0.ffn_down.weight, row 3, column 7 is inf" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf"]
    assert cli.main(["validate", str(tmp_path / "a.gguf")]) == 1
    assert f"weight {3 * 192 + 7} is inf" in capsys.readouterr().out


@pytest.mark.parametrize(("byte", "value", "reason"), [(3, 0x80, "reserved bit"), (1, 0x7C, "the scale is")])
def test_bad_block_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], byte: int, value: int, reason: str
) -> None:
    make(tmp_path / "a.gguf")
    convert.quantize(tmp_path / "a.gguf", tmp_path / "pn.gguf", mix.load("smallest"))
    file = gguf.read(tmp_path / "pn.gguf")
    tensor = next(t for t in file.tensors if t.type_name == "pn3t")
    data = bytearray((tmp_path / "pn.gguf").read_bytes())
    data[file.data_start + tensor.offset + 34 * 9 + byte] |= value
    (tmp_path / "pn.gguf").write_bytes(data)
    assert cli.main(["validate", str(tmp_path / "pn.gguf")]) == 1
    out = capsys.readouterr().out
    assert f"tensor {tensor.name} (pn3t) block 9: " in out
    assert reason in out


def test_truncated_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "a.gguf")
    convert.quantize(tmp_path / "a.gguf", tmp_path / "pn.gguf", mix.load("smallest"))
    data = (tmp_path / "pn.gguf").read_bytes()
    (tmp_path / "pn.gguf").write_bytes(data[:-2000])
    assert cli.main(["validate", str(tmp_path / "pn.gguf")]) == 1
    assert "the file is truncated" in capsys.readouterr().out
    assert cli.main(["dequantize", str(tmp_path / "pn.gguf"), str(tmp_path / "b.gguf")]) == 1
    (tmp_path / "pn.gguf").write_bytes(data[:60])
    assert cli.main(["info", str(tmp_path / "pn.gguf")]) == 1
    assert "the header ends early" in capsys.readouterr().err


def test_unknown_rotation_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "a.gguf")
    convert.quantize(tmp_path / "a.gguf", tmp_path / "pn.gguf", mix.load("smallest"))
    data = (tmp_path / "pn.gguf").read_bytes()
    (tmp_path / "pn.gguf").write_bytes(data.replace(b"\x04\0\0\0\0\0\0\0none", b"\x04\0\0\0\0\0\0\0quip"))
    with pytest.raises(convert.ConvertError, match="'quip'"):
        convert.dequantize(tmp_path / "pn.gguf", tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"GGUX" + bytes(40), "no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 1, 1) + bytes(40), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 1) + bytes(40), "announces"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60) + bytes(40), "a name of"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IQ", 8, 1 << 50) + bytes(9), "a string of"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 50) + bytes(9),
            "an array of",
        ),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<IQQIQ", 2, 0, 5, 0, 0), "impossible"),
    ],
)
def test_reader_has_limits(tmp_path: Path, head: bytes, message: str) -> None:
    (tmp_path / "x.gguf").write_bytes(head)
    with pytest.raises(gguf.GgufError, match=message):
        gguf.read(tmp_path / "x.gguf")


def test_both_readers_know_the_same_types_and_see_the_same_file(tmp_path: Path) -> None:
    """The engine has a reader of its own: it runs without the collection and keeps metadata as bytes, to rewrite it."""
    assert {i: (t.name.upper(), t.weights, t.size) for i, t in gguf.TYPES.items()} == {
        i: (name.upper(), weights, size) for i, (name, weights, size) in _gguf.TYPES.items()
    }
    make(tmp_path / "a.gguf")
    convert.quantize(tmp_path / "a.gguf", tmp_path / "pn.gguf", mix.load("smallest"))
    for name in ("a.gguf", "pn.gguf"):
        ours = gguf.read(tmp_path / name)
        other, size = _gguf.read_file(str(tmp_path / name))
        assert other.data_start == ours.data_start
        assert [(t.name, t.shape, t.type, t.offset, t.size) for t in other.tensors] == [
            (t.name, t.shape, t.type_id, t.offset, t.size()) for t in ours.tensors
        ]
        assert list(other.metadata) == list(ours.pairs)
        assert _gguf.check(other, size) == []


def test_p0k_rules() -> None:
    rules = mix.load("p0k")

    def chosen(name: str, *shape: int) -> str | None:
        kind = rules.choose(gguf.Tensor(name, shape, 1, 0))
        return kind.name if kind else None

    assert chosen("blk.3.ffn_up.weight", 5120, 17408) == "pn3t"
    assert chosen("blk.3.attn_k.weight", 5120, 1024) == "pn4t"
    assert chosen("blk.3.ffn_down.weight", 17408, 5120) == "pn4t"
    assert chosen("blk.3.attn_output.weight", 6144, 5120) == "pn4t"
    assert chosen("token_embd.weight", 5120, 99) is None
    assert chosen("blk.3.ssm_alpha.weight", 5120, 48) is None
    assert chosen("blk.3.attn_norm.weight", 5120) is None


def test_rows_that_do_not_divide(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text("[[rule]]\ntensors='.*'\ntype='pn3t'\n")
    with pytest.raises(mix.MixError, match=r"blk.0.x.weight.*100 weights"):
        mix.load(str(path)).choose(gguf.Tensor("blk.0.x.weight", (100, 4), 0, 0))


@pytest.mark.parametrize(
    "text", ["", "x = 1", "[[rule]]\ntype='pn9t'\ntensors='a'", "[[rule]]\ntype='pn3t'\ntensors='('"]
)
def test_mix_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.toml").write_text(text)
    with pytest.raises(mix.MixError, match="mix "):
        mix.load(str(tmp_path / "m.toml"))


def test_quantized_source_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "a.gguf")
    convert.quantize(tmp_path / "a.gguf", tmp_path / "pn.gguf", mix.load("smallest"))
    with pytest.raises(convert.ConvertError, match=r"attn_q\.weight is pn3t"):
        convert.quantize(tmp_path / "pn.gguf", tmp_path / "b.gguf", mix.load("smallest"))


def test_shuffled_neurons_leave_the_products_as_they_are(tmp_path: Path) -> None:
    names = {"blk.0.ffn_up.weight": (8, 6), "blk.0.ffn_down.weight": (6, 8), "blk.0.attn_q.weight": (8, 8)}
    made = {n: RNG.integers(-9, 9, s[::-1]).astype("<f4") for n, s in names.items()}

    def fill(i: int, stream) -> None:  # type: ignore[no-untyped-def]
        stream.write(made[list(names)[i]].tobytes())

    gguf.write(tmp_path / "a.gguf", {}, [(n, s, 0) for n, s in names.items()], fill)
    assert reorder.reorder(tmp_path / "a.gguf", tmp_path / "b.gguf") == 2
    found = load(tmp_path / "b.gguf")
    assert (found["blk.0.attn_q.weight"] == made["blk.0.attn_q.weight"]).all()
    assert (found["blk.0.ffn_up.weight"] != made["blk.0.ffn_up.weight"]).any()
    down, up = ("blk.0.ffn_down.weight", "blk.0.ffn_up.weight")
    assert (found[down] @ found[up] == made[down] @ made[up]).all()
