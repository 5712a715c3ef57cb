"""Trace files: chunks with a checksum each, written so that whatever is there when writing stops can be read."""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from mlaplan._types import Int32Array
from mlaplan.trace.header import Header
from mlaplan.trace.records import ChunkEncoder, Record, TraceError, decode_chunk

VERSION = 1
MAGIC = b"\x93mlaplan"
MOST_CHUNK_BYTES = 1 << 26
MOST_HEADER_BYTES = 1 << 20
_START = struct.Struct("<8sI")
_CHUNK = struct.Struct("<IIII")  # kind, bytes unpacked, bytes stored, CRC-32 of those three and of the stored bytes
_HEADER, _RECORDS, _END = 1, 2, 3
_LEVEL = 1  # of zlib: a chunk is packed by the thread that plans


def pack_header(header: Header) -> bytes:
    """Returns the first bytes of a file: magic, version and header."""
    return _START.pack(MAGIC, VERSION) + _pack(_HEADER, json.dumps(header.as_document()).encode())


def pack_records(encoder: ChunkEncoder) -> bytes:
    """Returns a chunk of records.

    Raises:
        ValueError: The chunk is too large.
    """
    text = json.dumps({"decisions": encoder.decisions}).encode()
    text += b" " * (-len(text) % 4)
    words = encoder.take().astype("<i4", copy=False)
    return _pack(_RECORDS, struct.pack("<I", len(text)) + text + words.tobytes())


def pack_end(steps: int, *, full: bool = False, dropped: int = 0) -> bytes:
    """Returns the last chunk: steps in the file, whether it ends because it is full, and how many it lost in front."""
    return _pack(_END, json.dumps({"steps": steps, "full": full, "dropped": dropped}).encode())


def _pack(kind: int, content: bytes) -> bytes:
    if len(content) > MOST_CHUNK_BYTES:
        raise ValueError(f"a chunk has {len(content)} bytes, must be at most {MOST_CHUNK_BYTES}")
    stored = zlib.compress(content, _LEVEL)
    numbers = struct.pack("<III", kind, len(content), len(stored))
    return numbers + struct.pack("<I", zlib.crc32(stored, zlib.crc32(numbers))) + stored


def create(path: str | os.PathLike[str], *, overwrite: bool = False) -> IO[bytes]:
    """Opens a file to be written, exactly where it is named.

    Args:
        path: The file. Its folder must be there.
        overwrite: Whether a file that is there may be replaced.

    Raises:
        FileExistsError: It is there, and may not be replaced.
        OSError: It is a symbolic link or no regular file, or cannot be written.
    """
    file = Path(path)
    flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    if file.is_symlink():
        raise OSError(f"{file} is a symbolic link: name the file itself")
    if overwrite and file.exists():
        if not stat.S_ISREG(file.stat().st_mode):
            raise OSError(f"{file} is not a regular file")
        flags |= os.O_TRUNC
    else:
        flags |= os.O_EXCL
    try:
        descriptor = os.open(file, flags, 0o644)
    except FileExistsError:
        raise FileExistsError(f"{file} is there already; it is overwritten only when that is asked for") from None
    return os.fdopen(descriptor, "wb", buffering=0)


def write_all(file: IO[bytes], content: bytes) -> None:
    """Writes all bytes to a file without a buffer, which may take fewer at a time."""
    view = memoryview(content)
    while view:
        written = file.write(view)
        if not written:
            raise OSError("nothing was written")
        view = view[written:]


def write_trace(
    path: str | os.PathLike[str], header: Header, records: list[Record], *, steps: int, overwrite: bool = False
) -> None:
    """Writes a whole trace.

    Args:
        path: The file.
        header: Its header.
        records: What it holds.
        steps: How many of the records are steps.
        overwrite: Whether a file that is there may be replaced.

    Raises:
        OSError: The file cannot be written; see `create`.
        ValueError: A record is too large.
    """
    encoder = ChunkEncoder()
    for record in records:
        encoder.add(record)
    content = pack_header(header) + pack_records(encoder) + pack_end(steps)
    with create(path, overwrite=overwrite) as file:
        write_all(file, content)


class TraceReader:
    """A trace file. Holds one chunk at a time.

    Attributes:
        header: Its header.
        damage: What is wrong with the part that could not be read, once `records` has come there; None where all was
            read.
        end: What the last chunk says: `steps`, `full` (recording ended for lack of room) and `dropped` (steps in front
            of the first one kept). None where there is none, because recording was cut short.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads the header.

        Args:
            path: The file.

        Raises:
            OSError: It does not exist, is a directory or may not be read.
            TraceError: It is not a trace, or one of another version.
        """
        self.path = Path(path)
        mode = self.path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(f"{self.path} is a directory, expected a trace")
        if not stat.S_ISREG(mode):
            raise TraceError(f"{self.path} is not a regular file")
        self.damage: str | None = None
        self.end: dict[str, Any] | None = None
        with self.path.open("rb") as file:
            try:
                self.header = _read_header(file)
            except TraceError as error:
                raise TraceError(f"{self.path}: {error}") from error
            self._first = file.tell()

    def records(self) -> Iterator[Record]:
        """Yields the records in order, up to the first chunk that is damaged or cut off."""
        self.damage = self.end = None
        with self.path.open("rb") as file:
            file.seek(self._first)
            while True:
                begin = file.tell()
                # A chunk is decoded before any of it is handed out: what its checksum let through may yet be wrong.
                try:
                    chunk = _read_chunk(file, MOST_CHUNK_BYTES)
                    if chunk is None:
                        return
                    found = self._decode(*chunk)
                except TraceError as error:
                    self.damage = f"damaged from byte {begin} on: {error}"
                    return
                yield from found
                if chunk[0] == _END:
                    return

    def _decode(self, kind: int, content: bytes) -> list[Record]:
        if kind == _RECORDS:
            decisions, words = _unpack_records(content)
            return list(decode_chunk(words, decisions))
        if kind != _END:
            raise TraceError(f"a chunk is of kind {kind}, known are 2 and 3")
        self.end = _json(content)
        return []


def _read_header(file: IO[bytes]) -> Header:
    start = file.read(_START.size)
    if len(start) < _START.size or start[: len(MAGIC)] != MAGIC:
        raise TraceError("not a trace of mlaplan")
    version = _START.unpack(start)[1]
    if version != VERSION:
        raise TraceError(f"a trace of version {version}; this mlaplan reads version {VERSION} and no other")
    chunk = _read_chunk(file, MOST_HEADER_BYTES)
    if chunk is None or chunk[0] != _HEADER:
        raise TraceError("the trace has no header")
    return Header.from_document(_json(chunk[1]))


def _read_chunk(file: IO[bytes], most: int) -> tuple[int, bytes] | None:
    """Returns a chunk's kind and content, None at the end of the file."""
    numbers = file.read(_CHUNK.size)
    if not numbers:
        return None
    if len(numbers) < _CHUNK.size:
        raise TraceError("the file ends in a chunk's first bytes")
    kind, size, stored_size, checksum = _CHUNK.unpack(numbers)
    # zlib adds a few bytes to what it cannot make smaller.
    if size > most or stored_size > most + most // 1000 + 64:
        raise TraceError(f"a chunk has {size} bytes, must be at most {most}")
    stored = file.read(stored_size)
    if len(stored) < stored_size:
        raise TraceError("the file ends in a chunk")
    if zlib.crc32(stored, zlib.crc32(numbers[:12])) != checksum:
        raise TraceError("a chunk's checksum is wrong")
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(stored, size + 1)
    except zlib.error as error:
        raise TraceError(f"a chunk cannot be unpacked: {error}") from error
    if len(content) != size or not unpacker.eof:
        raise TraceError(f"a chunk does not hold the {size} bytes that it should")
    return kind, content


def _unpack_records(content: bytes) -> tuple[list[tuple[str, tuple[str, ...]]], Int32Array]:
    if len(content) < 4:
        raise TraceError("a chunk of records is empty")
    (size,) = struct.unpack_from("<I", content)
    if size > len(content) - 4 or (len(content) - 4 - size) % 4:
        raise TraceError("a chunk's table of decisions has the wrong length")
    table = _json(content[4 : 4 + size]).get("decisions")
    if not isinstance(table, list):
        raise TraceError("a chunk has no table of decisions")
    decisions = []
    for entry in table:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list)):
            raise TraceError("a chunk's table of decisions has an entry that is none")
        decisions.append((str(entry[0]), tuple(str(reason) for reason in entry[1])))
    return decisions, np.frombuffer(content, "<i4", offset=4 + size).astype(np.int32)


def _json(content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise TraceError(f"text that is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise TraceError("JSON text that is no object")
    return document
