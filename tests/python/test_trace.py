"""Traces: what is written is read back, and what is not a trace is refused or read as far as it is one."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import mlaplan
from mlaplan._types import Int32Array
from mlaplan.costs import CostTable
from mlaplan.layout import PlanArrays
from mlaplan.trace import DumpRecord, EventRecord, Header, Record, StepRecord, TraceError, TraceReader, write_trace
from mlaplan.trace.file import MAGIC, MOST_CHUNK_BYTES
from mlaplan.trace.records import EVENTS, KINDS, SOURCES

_WORDS = st.integers(-(2**31), 2**31 - 1)
_COUNTS = st.integers(0, 2**31 - 1)
_LONG = st.integers(0, 2**62 - 1)
HEADER = Header(
    config=mlaplan.PlannerConfig(max_rows=64, max_requests=16, topk=16, num_cus=20, fold=1, arch=None),
    device="cpu",
    versions={"mlaplan": mlaplan.__version__},
    created_s=12,
    note="a test",
)


def words(size: int) -> st.SearchStrategy[Int32Array]:
    return npst.arrays(np.int32, size, elements=_WORDS)


@st.composite
def steps(draw: st.DrawFn) -> StepRecord:
    requests = draw(st.integers(0, 5))
    kind = draw(st.sampled_from(KINDS))
    truth = draw(st.booleans())
    return StepRecord(
        index=draw(_LONG),
        time_us=draw(_LONG),
        host_ns=draw(_COUNTS),
        query_start_loc=draw(words(requests + 1)),
        kind=kind,
        lengths=None if kind == "unknown" else draw(words(requests)),
        max_rejects=draw(_COUNTS),
        padded_rows=draw(st.none() | _COUNTS),
        boundaries_exact=draw(st.booleans()),
        has_device_boundaries=draw(st.booleans()),
        has_device_lengths=draw(st.booleans()),
        deferred=draw(st.booleans()),
        action=draw(st.sampled_from(("nothing", "copy", "launch", "deferred"))),
        reasons=tuple(draw(st.lists(st.sampled_from(("first plan", "forced", "é")), max_size=2))),
        rows=draw(_COUNTS),
        row_class=draw(_COUNTS),
        num_works=draw(st.none() | _COUNTS),
        split_budget=draw(st.none() | st.integers(-1, 2**31 - 1)),
        device_query_start_loc=draw(words(requests + 1)) if truth else None,
        device_seq_lens=draw(words(requests)) if truth else None,
    )


@st.composite
def dumps(draw: st.DrawFn) -> DumpRecord:
    requests, rows, cus, fold, works = (draw(st.integers(least, 4)) for least in (0, 1, 1, 1, 0))
    shapes = ((rows,), (rows + 1,), (cus + 1,), (rows * fold + 1,), (works, 8))
    return DumpRecord(
        index=draw(_LONG),
        source=draw(st.sampled_from(SOURCES)),
        query_start_loc=draw(words(requests + 1)),
        seq_lens=draw(words(requests)),
        num_cus=cus,
        fold=fold,
        arrays=PlanArrays(*(draw(npst.arrays(np.int32, shape, elements=_WORDS)) for shape in shapes)),
    )


_EVENTS = st.builds(EventRecord, index=_LONG, time_us=_LONG, what=st.sampled_from(EVENTS))
_RECORDS = st.lists(steps() | _EVENTS | dumps(), max_size=8)


def same(one: Any, other: Any) -> bool:
    """Whether two records, or their fields, are equal, arrays included."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if dataclasses.is_dataclass(one):
        names = [entry.name for entry in dataclasses.fields(one)]
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, PlanArrays):
        return all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def same_records(one: list[Record], other: list[Record]) -> bool:
    return len(one) == len(other) and all(map(same, one, other))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@given(records=_RECORDS)
def test_what_is_written_is_read(records: list[Record], folder: Path) -> None:
    path = folder / "whole.trace"
    write_trace(path, HEADER, records, steps=3, overwrite=True)
    reader = TraceReader(path)
    assert same_records(list(reader.records()), records)
    assert reader.header == HEADER
    assert (reader.damage, reader.end) == (None, {"steps": 3, "full": False, "dropped": 0})
    assert same_records(list(reader.records()), records), "a second time"


@given(records=_RECORDS, cut=st.floats(0, 1))
def test_a_trace_that_is_cut_off_is_read_up_to_there(records: list[Record], cut: float, folder: Path) -> None:
    path = folder / "cut.trace"
    write_trace(path, HEADER, records, steps=len(records), overwrite=True)
    content = path.read_bytes()
    kept = int(cut * len(content))
    path.write_bytes(content[:kept])
    try:
        reader = TraceReader(path)
    except TraceError as error:
        assert str(path) in str(error)  # noqa: PT017  (the other outcome is as good)
        return
    read = list(reader.records())
    assert same_records(read, records[: len(read)])
    if kept < len(content):
        assert reader.end is None


@settings(max_examples=150)
@given(data=st.data())
def test_whatever_bytes_come_a_prefix_is_read_or_one_error_raised(data: st.DataObject, folder: Path) -> None:
    """Mutations of all kinds: of the file's bytes, and of what is in a chunk behind a right checksum."""
    path = folder / "mutated.trace"
    records: list[Record] = data.draw(st.lists(steps() | _EVENTS | dumps(), min_size=1, max_size=4))
    write_trace(path, HEADER, records, steps=len(records), overwrite=True)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = repacked(content, data)
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(content) - 1))
            content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=6))
    path.write_bytes(bytes(content))
    try:
        reader = TraceReader(path)
        for record in reader.records():
            assert isinstance(record, (StepRecord, EventRecord, DumpRecord))
    except TraceError:
        pass


def repacked(content: bytearray, data: st.DataObject) -> bytearray:
    """The file with changes inside one chunk, whose checksum is right all the same."""
    chunks, at = [], len(MAGIC) + 4
    while at < len(content):
        kind, _, stored, _ = struct.unpack_from("<IIII", content, at)
        chunks.append([kind, zlib.decompress(content[at + 16 : at + 16 + stored])])
        at += 16 + stored
    chosen = data.draw(st.sampled_from(chunks))
    inner = bytearray(chosen[1])
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(0, len(inner)))
        inner[where : where + data.draw(st.sampled_from((0, 1, 4)))] = data.draw(st.binary(max_size=8))
    chosen[1] = bytes(inner)
    made = bytearray(content[: len(MAGIC) + 4])
    for kind, text in chunks:
        packed = zlib.compress(text)
        numbers = struct.pack("<III", kind, len(text), len(packed))
        made += numbers + struct.pack("<I", zlib.crc32(packed, zlib.crc32(numbers))) + packed
    return made


def chunk(kind: int, content: bytes, size: int | None = None) -> bytes:
    stored = zlib.compress(content)
    numbers = struct.pack("<III", kind, len(content) if size is None else size, len(stored))
    return numbers + struct.pack("<I", zlib.crc32(stored, zlib.crc32(numbers))) + stored


def head(**changes: Any) -> bytes:
    document = HEADER.as_document()
    document["config"].update(changes)
    return MAGIC + struct.pack("<I", 1) + chunk(1, json.dumps(document).encode())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a trace of mlaplan"),
        (b"arrival_ms,input_tokens,output_tokens\n", "not a trace of mlaplan"),
        (MAGIC, "not a trace of mlaplan"),
        (MAGIC + struct.pack("<I", 2) + chunk(1, b"{}"), "a trace of version 2; this mlaplan reads version 1"),
        (MAGIC + struct.pack("<I", 1), "the trace has no header"),
        (MAGIC + struct.pack("<I", 1) + chunk(2, b"{}"), "the trace has no header"),
        (MAGIC + struct.pack("<I", 1) + chunk(1, b"{}"), "the header names no settings"),
        (MAGIC + struct.pack("<I", 1) + chunk(1, b"[" * 100_000), "text that is not JSON"),
        (MAGIC + struct.pack("<I", 1) + chunk(1, b" " * 2_000_000), "a chunk has 2000000 bytes, must be at most"),
        (MAGIC + struct.pack("<I", 1) + chunk(1, b" " * 2_000_000, size=10), "does not hold the 10 bytes"),
        (MAGIC + struct.pack("<I", 1) + struct.pack("<IIII", 1, 9, 2**32 - 1, 0), "must be at most"),
        (head(colour=3), "settings that mlaplan"),
        (head(topk=0), "topk is 0"),
        (head(max_rows="many"), "max_rows must be a whole number"),
        (head(cost_table={"block_tokens": 1}), "the header's settings do not hold"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "no.trace"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        TraceReader(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("behind", "message"),
    [
        (b"\x02", "the file ends in a chunk's first bytes"),
        (chunk(2, b"")[:-3], "the file ends in a chunk"),
        (chunk(9, b"{}"), "a chunk is of kind 9"),
        (chunk(2, b""), "a chunk of records is empty"),
        (chunk(2, struct.pack("<I", 900)), "table of decisions has the wrong length"),
        (chunk(2, struct.pack("<I", 4) + b"[]  "), "JSON text that is no object"),
        (chunk(2, struct.pack("<I", 20) + b'{"decisions": [5]}  '), "an entry that is none"),
        (chunk(2, struct.pack("<I", 20) + b'{"decisions": []}   ' + struct.pack("<ii", 7, 0)), "a record has tag 7"),
        (chunk(2, struct.pack("<I", 20) + b'{"decisions": []}   ' + struct.pack("<ii", 1, 99)), "99 words, 0 are left"),
        (chunk(2, struct.pack("<I", 20) + b'{"decisions": []}   ' + struct.pack("<ii", 2, -1)), "-1 words"),
        (struct.pack("<IIII", 2, MOST_CHUNK_BYTES + 1, 4, 0) + b"abcd", "must be at most"),
        (struct.pack("<IIII", 2, 4, 4, 0) + b"abcd", "checksum is wrong"),
    ],
)
def test_damage_behind_the_header_is_named_with_its_place(tmp_path: Path, behind: bytes, message: str) -> None:
    path = tmp_path / "damaged.trace"
    start = head()
    path.write_bytes(start + behind)
    reader = TraceReader(path)
    assert list(reader.records()) == []
    assert reader.damage is not None
    assert reader.damage.startswith(f"damaged from byte {len(start)} on: ")
    assert message in reader.damage
    assert reader.end is None


def test_a_chunk_that_unpacks_to_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    packer = zlib.compressobj(9)
    stored = b"".join(packer.compress(bytes(1 << 20)) for _ in range(300)) + packer.flush()
    numbers = struct.pack("<III", 2, 1000, len(stored))
    path = tmp_path / "bomb.trace"
    path.write_bytes(head() + numbers + struct.pack("<I", zlib.crc32(stored, zlib.crc32(numbers))) + stored)
    tracemalloc.start()
    reader = TraceReader(path)
    assert list(reader.records()) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "does not hold the 1000 bytes" in str(reader.damage)
    assert peak < 5_000_000


def test_a_header_keeps_every_setting() -> None:
    table = CostTable(block_tokens=16, block=10, piece=20, whole=15, slot=3, merge=2, cut=40)
    config = mlaplan.PlannerConfig(
        max_rows=640, max_requests=64, capture_sizes=(1, 8), split_budget=-1, policy="balanced", cost_table=table,
        num_cus=80, fold=1, always_rebuild=True, aiter_version="0.1.18",
    )  # fmt: skip
    header = dataclasses.replace(HEADER, config=config)
    document = json.loads(json.dumps(header.as_document()))
    assert Header.from_document(document) == header
    # Traces from before there was such a cost: their plans were made as if it were 0.
    del document["config"]["cost_table"]["cut"]
    older = dataclasses.replace(config, cost_table=dataclasses.replace(table, cut=0))
    assert Header.from_document(document) == dataclasses.replace(header, config=older)


def test_files_are_written_where_they_are_named_and_nowhere_else(tmp_path: Path) -> None:
    target, link = tmp_path / "there.trace", tmp_path / "link.trace"
    write_trace(target, HEADER, [], steps=0)
    before = target.read_bytes()
    with pytest.raises(FileExistsError, match=r"there\.trace is there already"):
        write_trace(target, HEADER, [], steps=1)
    assert target.read_bytes() == before
    write_trace(target, HEADER, [], steps=1, overwrite=True)
    assert target.read_bytes() != before
    link.symlink_to(tmp_path / "elsewhere.trace")
    for overwrite in (False, True):
        with pytest.raises(OSError, match="is a symbolic link"):
            write_trace(link, HEADER, [], steps=0, overwrite=overwrite)
    assert not (tmp_path / "elsewhere.trace").exists()
    with pytest.raises(OSError, match="is not a regular file"):
        write_trace(tmp_path, HEADER, [], steps=0, overwrite=True)
    with pytest.raises(FileNotFoundError):
        write_trace(tmp_path / "none" / "a.trace", HEADER, [], steps=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.trace", "there.trace"]


def test_reading_refuses_folders_and_pipes(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="expected a trace"):
        TraceReader(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="is not a regular file"):
        TraceReader(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        TraceReader(tmp_path / "missing")
