"""The window file: what is built any safetensors reader reads; what is read is not believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file

from optstream.errors import FormatError, OffloadError
from optstream.format import (
    TensorRecord,
    build_header,
    dtype_name,
    header_size,
    parse_header,
    read_header,
)

PAGE = 4096
# what a safetensors reader sees of torch dtypes that it has no type for
SHOWN_AS = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
DTYPES = [
    *SHOWN_AS,
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
]


def record(
    shape: tuple[int, ...] = (3, 5), fqn: str = "w", key: str = "exp_avg", **changes: Any
) -> TensorRecord:
    plain = TensorRecord(fqn, key, "float32", shape, shape, start=0, offset=0)
    return replace(plain, **changes)


def lay_out(records: list[TensorRecord]) -> tuple[list[TensorRecord], int]:
    """Return the records one behind the other, aligned, and the size of the data."""
    placed, end = [], 0
    for each in records:
        placed.append(replace(each, offset=-(-end // 64) * 64))
        end = placed[-1].end
    return placed, -(-end // PAGE) * PAGE


def make_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def random(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    num_bytes = torch.empty(shape, dtype=dtype).nbytes
    top = 2 if dtype == torch.bool else 100
    raw = torch.randint(0, top, (num_bytes,), dtype=torch.uint8)
    return torch.frombuffer(bytearray(raw.tolist()) or bytearray(16), dtype=dtype)[
        : torch.Size(shape).numel()
    ].view(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", [(3, 5), (7,), (2, 1, 3)], ids=str)
def test_safetensors_reads_every_dtype(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensors = {f"{name}/exp_avg": random(dtype, shape) for name in ("a", "b.c")}
    records, data_bytes = lay_out(
        [record(shape, fqn=name.split("/")[0], dtype=dtype_name(dtype)) for name in tensors]
    )
    data = bytearray(data_bytes)
    for each, tensor in zip(records, tensors.values(), strict=True):
        data[each.offset : each.end] = make_bytes(tensor)
    path = tmp_path / "window.safetensors"
    path.write_bytes(build_header(records, data_bytes) + data)
    shown = load_file(path)
    for name, tensor in tensors.items():
        assert shown[name].dtype == SHOWN_AS.get(dtype, dtype)
        assert shown[name].shape[: len(shape)] == shape
        assert shown[name].shape[len(shape) :] == ((2,) if dtype.is_complex else ())
        assert make_bytes(shown[name]) == make_bytes(tensor)
    with safe_open(path, "pt") as file:
        rows = file.get_slice("b.c/exp_avg")[1:2]
        assert make_bytes(rows) == make_bytes(shown["b.c/exp_avg"][1:2])
    assert read_header(path).records == tuple(records)


def test_layout(tmp_path: Path) -> None:
    """Data starts and ends on a page, with pads wherever there is a gap, and only there."""
    records, data_bytes = lay_out(
        [
            record((16,), "a"),
            record((1,), "b", start=4, global_shape=(5,)),
            record((), "c", key="step"),
            record((0, 3), "d"),
            record((0,), "e", key='é/ "quoted" \U0001f600'),
            record((960,), "f"),
        ]
    )
    header = build_header(records, data_bytes)
    assert len(header) % PAGE == 0
    assert header_size(header, len(header) + data_bytes, "x") == len(header)
    shown = load(header + bytes(data_bytes))
    assert {name: tuple(tensor.shape) for name, tensor in shown.items()} == {
        "a/exp_avg": (16,),
        "b/exp_avg[4:5]": (1,),
        "c/step": (),
        "d/exp_avg": (0, 3),
        'e/é/ "quoted" \U0001f600': (0,),
        "f/exp_avg": (960,),
        "pad0": (60,),
        "pad1": (60,),
        "pad2": (data_bytes - 192 - 3840,),
    }
    assert all(tensor.dtype == torch.uint8 for name, tensor in shown.items() if "pad" in name)


def test_no_last_pad_on_a_page_boundary() -> None:
    header = build_header([record((1024,))], PAGE)
    assert set(load(header + bytes(PAGE))) == {"w/exp_avg"}


def test_no_tensors_at_all(tmp_path: Path) -> None:
    path = tmp_path / "window"
    path.write_bytes(build_header([], 0))
    assert load_file(path) == {}
    assert read_header(path).records == ()


def test_permuted_state_is_shown_flat() -> None:
    tensor = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    (placed,), data_bytes = lay_out(
        [record(tuple(tensor.shape), stride=tensor.stride(), dtype="float32")]
    )
    header = build_header([placed], data_bytes)
    data = make_bytes(torch.arange(24.0)).ljust(data_bytes)
    shown = load(header + data)["w/exp_avg"]
    (again,) = parse_header(header, len(header) + data_bytes, "x").records
    assert shown.shape == (24,)
    assert again.stride is not None
    assert torch.equal(shown.as_strided(again.shape, again.stride), tensor)


def test_metadata_says_what_safetensors_cannot() -> None:
    piece = record((4,), key="master", start=64, global_shape=(10, 10), dtype="complex64")
    header = build_header([piece], PAGE)
    metadata = json.loads(header[8:])["__metadata__"]
    assert metadata["format"] == "pt"
    assert json.loads(metadata["w/master[64:68]"]) == {
        "fqn": "w",
        "key": "master",
        "dtype": "complex64",
        "codec": "exact",
        "shape": [4],
        "global_shape": [10, 10],
        "start": 64,
    }


def test_thousands_of_tensors() -> None:
    records, data_bytes = lay_out([record((i % 7, 3), f"layers.{i}.w") for i in range(3000)])
    header = build_header(reversed(records), data_bytes)
    assert len(load(header + bytes(data_bytes))) > 3000
    parsed = parse_header(header, len(header) + data_bytes, "x")
    assert set(parsed.records) == set(records)
    assert (parsed.header_bytes, parsed.data_bytes) == (len(header), data_bytes)


@pytest.mark.parametrize(
    ("records", "data_bytes", "fault"),
    [
        ([record()], 0, "end at byte 60 of 0"),
        ([record()], 100, "end at byte 60 of 100"),
        ([record(offset=60)], PAGE, "no multiple of 64"),
        ([record(offset=-64)], PAGE, "negative"),
        ([record(start=-1)], PAGE, "negative"),
        ([record((-1, 5), global_shape=(5, 5))], PAGE, "negative"),
        ([record(), record()], PAGE, "overlaps"),
        ([record(), record(offset=64)], PAGE, "there twice"),
        ([record((20,)), record(key="m", offset=64)], PAGE, "overlaps"),
        ([record(start=1)], PAGE, "ends behind the whole"),
        ([record(stride=(1, 4))], PAGE, "not dense"),
        ([record(stride=(5,))], PAGE, "not dense"),
        ([record(dtype="qint8")], PAGE, "unknown dtype"),
    ],
)
def test_records_that_contradict(records: list[TensorRecord], data_bytes: int, fault: str) -> None:
    with pytest.raises(FormatError, match=fault):
        build_header(records, data_bytes)


def test_dtype_names() -> None:
    for dtype in DTYPES:
        assert getattr(torch, dtype_name(dtype)) is dtype
    with pytest.raises(FormatError, match=r"torch\.qint8 cannot be stored"):
        dtype_name(torch.qint8)


def _rewritten(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return a window file whose header object was changed."""
    (first, second), data_bytes = lay_out([record(), record((2,), "v")])
    entries = json.loads(build_header([first, second], data_bytes)[8:])
    change(entries)
    return _file(json.dumps(entries).encode(), data_bytes)


def _file(text: bytes, data_bytes: int) -> bytes:
    num_bytes = -(-(8 + len(text)) // PAGE) * PAGE - 8
    return num_bytes.to_bytes(8, "little") + text.ljust(num_bytes) + bytes(data_bytes)


def _describe(entries: dict[str, Any], **changes: object) -> None:
    fields = json.loads(entries["__metadata__"]["w/exp_avg"])
    fields |= changes
    fields = {name: value for name, value in fields.items() if value != "drop"}
    entries["__metadata__"]["w/exp_avg"] = json.dumps(fields, separators=(",", ":"))


MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": bytes(7),
    "length too large": (2**63).to_bytes(8, "little") + bytes(PAGE - 8),
    "length behind the end": (2 * PAGE - 8).to_bytes(8, "little") + bytes(PAGE - 8),
    "length not padded": (100).to_bytes(8, "little") + bytes(PAGE - 8),
    "file cut in a page": _rewritten(lambda e: None)[:-1],
    "file cut by a page": _rewritten(lambda e: None)[:-PAGE],
    "file too long": _rewritten(lambda e: None) + bytes(PAGE),
    "no JSON": _file(b"{", 0),
    "no UTF-8": _file(b'{"\xff": 1}', 0),
    "no object": _file(b"[]", 0),
    "deep": _file(b"[" * 100_000, 0),
    "no metadata": _file(b"{}", 0),
    "metadata no object": _file(b'{"__metadata__": 3}', 0),
    "other program's": _file(b'{"__metadata__": {"format": "pt"}}', 0),
    "later version": _rewritten(lambda e: e["__metadata__"].update(optstream="2")),
    "no version": _rewritten(lambda e: e["__metadata__"].pop("optstream")),
    "name twice": _file(b'{"__metadata__": {"optstream": "1"}, "a": 1, "a": 1}', 0),
    "tensor missing": _rewritten(lambda e: e.pop("w/exp_avg")),
    "tensor undescribed": _rewritten(lambda e: e["__metadata__"].pop("w/exp_avg")),
    "tensor too many": _rewritten(lambda e: e.update(more=e["w/exp_avg"])),
    "pad missing": _rewritten(lambda e: e.pop("pad0")),
    "pad of another type": _rewritten(lambda e: e["pad0"].update(dtype="I8")),
    "entry no object": _rewritten(lambda e: e.update({"w/exp_avg": 7})),
    "entry with more": _rewritten(lambda e: e["w/exp_avg"].update(more=1)),
    "dtype": _rewritten(lambda e: e["w/exp_avg"].update(dtype="I32")),
    "shape": _rewritten(lambda e: e["w/exp_avg"].update(shape=[5, 3])),
    "shape of booleans": _rewritten(lambda e: e["w/exp_avg"].update(shape=[3, 5.0])),
    "offsets moved": _rewritten(lambda e: e["w/exp_avg"].update(data_offsets=[64, 124])),
    "offsets past the end": _rewritten(lambda e: e["w/exp_avg"].update(data_offsets=[2**40, 0])),
    "offsets negative": _rewritten(lambda e: e["w/exp_avg"].update(data_offsets=[-64, -4])),
    "offsets three": _rewritten(lambda e: e["w/exp_avg"].update(data_offsets=[0, 60, 60])),
    "offsets texts": _rewritten(lambda e: e["w/exp_avg"].update(data_offsets=["0", "60"])),
    "description no text": _rewritten(lambda e: e["__metadata__"].update({"w/exp_avg": 3})),
    "description no JSON": _rewritten(lambda e: e["__metadata__"].update({"w/exp_avg": "x"})),
    "description a list": _rewritten(lambda e: e["__metadata__"].update({"w/exp_avg": "[]"})),
    "field missing": _rewritten(lambda e: _describe(e, codec="drop")),
    "field too many": _rewritten(lambda e: _describe(e, path="../../x")),
    "another parameter": _rewritten(lambda e: _describe(e, fqn="other")),
    "fqn no text": _rewritten(lambda e: _describe(e, fqn=["w"])),
    "start a boolean": _rewritten(lambda e: _describe(e, start=False)),
    "start behind the end": _rewritten(lambda e: _describe(e, start=1)),
    "start negative": _rewritten(lambda e: _describe(e, start=-1)),
    "unknown dtype": _rewritten(lambda e: _describe(e, dtype="float31")),
    "another shape": _rewritten(lambda e: _describe(e, shape=[15])),
    "huge shape": _rewritten(lambda e: _describe(e, shape=[2**62, 2**62], global_shape=[2**124])),
    "shape of texts": _rewritten(lambda e: _describe(e, shape=["3", "5"])),
    "stride": _rewritten(lambda e: _describe(e, stride=[1, 3])),
    "stride not dense": _rewritten(lambda e: _describe(e, stride=[0, 0])),
    "stride null": _rewritten(lambda e: _describe(e, stride=None)),
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_malformed_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "window"
    path.write_bytes(content)
    with pytest.raises(OffloadError, match=f"^{path}: ") as caught:
        read_header(path)
    assert isinstance(caught.value, FormatError)


@pytest.mark.parametrize("change", [lambda entries: None, _describe], ids=["same", "rewritten"])
def test_an_unchanged_file_is_accepted(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    path = tmp_path / "window"
    path.write_bytes(_rewritten(change))
    assert [each.name for each in read_header(path).records] == ["w/exp_avg", "v/exp_avg"]


def test_any_flipped_byte_of_the_text_is_noticed_or_harmless() -> None:
    """Whatever a byte turns into, the answer is an error or records that fit the file."""
    content = _rewritten(lambda entries: None)
    end = content.rindex(b"}") + 1
    for position in range(8, end):
        for flip in (1, 32, 128):
            changed = bytearray(content)
            changed[position] ^= flip
            try:
                header = parse_header(bytes(changed[:PAGE]), len(changed), "x")
            except FormatError:
                continue
            rebuilt = build_header(header.records, header.data_bytes)
            assert json.loads(rebuilt[8:]) == json.loads(changed[8:PAGE])
