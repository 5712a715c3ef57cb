"""Request logs: what arrived when, how long its prompt was and how much was generated."""

from __future__ import annotations

import csv
import gzip
import math
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

# Accepted header names, lower case, and what turns the value into the unit of `Request`.
_ARRIVAL_NAMES = {
    "arrival_ms": 1.0,
    "arrival_time_ms": 1.0,
    "timestamp_ms": 1.0,
    "timestamp": 1.0,
    "arrival_s": 1000.0,
    "arrival_seconds": 1000.0,
    "timestamp_s": 1000.0,
    "arrived_at": 1000.0,
}
_INPUT_NAMES = (
    "input_tokens",
    "input_length",
    "prompt_tokens",
    "prompt_length",
    "contexttokens",
    "num_prefill_tokens",
)
_OUTPUT_NAMES = (
    "output_tokens",
    "output_length",
    "completion_tokens",
    "generated_tokens",
    "generatedtokens",
    "num_decode_tokens",
)
_MAX_TOKENS = 2**31 - 1
_MAX_LINE = 65_536  # characters of an entry; what a spreadsheet adds to three numbers is far less
_MAX_ARRIVAL_MS = 2.0**53  # above it a float no longer tells one millisecond from the next


class Request(NamedTuple):
    """One request of a log.

    Attributes:
        arrival_ms: When it arrived, in milliseconds from the log's origin.
        input_tokens: Length of its prompt, at least 1.
        output_tokens: Tokens generated for it; 0 for a request that ends with its prompt.
    """

    arrival_ms: float
    input_tokens: int
    output_tokens: int


class LogError(ValueError):
    """A request log that cannot be read. The message names the file and, where there is one, the line."""


def read_log(path: str | os.PathLike[str]) -> Iterator[Request]:
    """Reads a request log in CSV, line by line.

    A header names the columns in any order (`arrival_ms`, `input_tokens`, `output_tokens`, or the names of
    published traces) and may have more of them; without one there are exactly these three. A file whose name
    ends in `.gz` is decompressed on the way. Blank lines are skipped. The file may have any number of lines, of at
    most 65,536 characters each; memory does not grow with it.

    Args:
        path: The file.

    Returns:
        An iterator over the requests; it holds one line at a time.

    Raises:
        OSError: The file does not exist, is a directory or may not be read.
        LogError: It is not a regular file, or what it holds is not a request log.
    """
    file = Path(path)
    try:
        mode = file.stat().st_mode
    except ValueError as error:  # a zero byte, for one
        raise LogError(f"{str(file)!r} is no file name: {error}") from error
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{file} is a directory, expected a request log in CSV")
    if not stat.S_ISREG(mode):
        raise LogError(f"{file} is not a regular file")
    return _requests(file)


def _open(file: Path) -> IO[str]:
    # newline="" leaves line ends inside quotes to the CSV reader; the BOM is what spreadsheets write.
    if file.name.endswith(".gz"):
        return gzip.open(file, "rt", encoding="utf-8-sig", newline="")
    return file.open(encoding="utf-8-sig", newline="")


def _requests(file: Path) -> Iterator[Request]:
    columns: _Columns | None = None
    previous = -math.inf
    found = False
    for line, cells in _lines(file):
        if columns is None:
            columns = _Columns.of(file, line, cells)
            if columns.from_header:
                continue
        request = columns.request(line, cells)
        if request.arrival_ms < previous:
            raise LogError(
                f"{file}, line {line}: arrival goes backwards, from {previous:.15g} ms to "
                f"{request.arrival_ms:.15g} ms; a log is sorted by arrival"
            )
        previous = request.arrival_ms
        found = True
        yield request
    if not found:
        raise LogError(f"{file} holds no requests")


def _lines(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the line number and the cells of each line that is not blank."""
    with _open(file) as stream:
        pieces = _Pieces(file, stream)
        reader = csv.reader(pieces, strict=True)
        while True:
            pieces.room = _MAX_LINE
            try:
                cells = next(reader)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                raise LogError(
                    f"{file}, after line {reader.line_num}: byte 0x{error.object[error.start]:02x} is not UTF-8"
                ) from error
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise LogError(f"{file}, after line {reader.line_num}: damaged gzip file: {error}") from error
            except csv.Error as error:
                raise LogError(f"{file}, line {reader.line_num}: not CSV: {error}") from error
            except OSError as error:
                raise LogError(f"{file}, after line {reader.line_num}: {error.strerror or error}") from error
            if any(cell.strip() for cell in cells):
                yield reader.line_num, cells


class _Pieces(Iterator[str]):
    """The lines of a stream, up to a length: what claims to be one line may be gigabytes, once it is decompressed.

    Attributes:
        room: Characters that the lines until the next setting of it may have together. An entry is a line, but for
            line ends between quotes.
    """

    def __init__(self, file: Path, stream: IO[str]) -> None:
        self._file = file
        self._stream = stream
        self._number = 0
        self.room = _MAX_LINE

    def __next__(self) -> str:
        line = self._stream.readline(self.room + 1)
        if not line:
            raise StopIteration
        self._number += 1
        self.room -= len(line)
        if self.room < 0:
            raise LogError(f"{self._file}, line {self._number}: more than {_MAX_LINE} characters in one entry")
        return line


class _Columns:
    """Where the three values of a request stand in a line."""

    def __init__(
        self,
        file: Path,
        names: tuple[str, str, str],
        positions: tuple[int, int, int],
        *,
        width: int,
        scale: float,
        from_header: bool,
    ) -> None:
        self._file = file
        self._names = names
        self._positions = positions
        self._width = width
        self._scale = scale
        self.from_header = from_header

    @classmethod
    def of(cls, file: Path, line: int, cells: list[str]) -> _Columns:
        """Takes the first line for a header unless all of its cells are numbers."""
        if all(_is_number(cell) for cell in cells):
            names = ("arrival_ms", "input_tokens", "output_tokens")
            return cls(file, names, (0, 1, 2), width=3, scale=1.0, from_header=False)
        header = [cell.strip().lower() for cell in cells]
        found: list[int] = []
        for label, known in (
            ("arrival", tuple(_ARRIVAL_NAMES)),
            ("input", _INPUT_NAMES),
            ("output", _OUTPUT_NAMES),
        ):
            positions = [position for position, name in enumerate(header) if name in known]
            if len(positions) != 1:
                how_many = "no" if not positions else "more than one"
                raise LogError(
                    f"{file}, line {line}: {how_many} {label} column among {_shown(header)}; "
                    f"known names are {', '.join(known)}"
                )
            found.append(positions[0])
        arrival, inputs, outputs = found
        names = (header[arrival], header[inputs], header[outputs])
        return cls(
            file,
            names,
            (arrival, inputs, outputs),
            width=len(header),
            scale=_ARRIVAL_NAMES[names[0]],
            from_header=True,
        )

    def request(self, line: int, cells: list[str]) -> Request:
        """Returns the request that a line describes."""
        if len(cells) != self._width:
            raise LogError(f"{self._file}, line {line}: {len(cells)} columns, expected {self._width}")
        arrival, inputs, outputs = (cells[position] for position in self._positions)
        return Request(
            self._number(line, 0, arrival, self._scale),
            self._tokens(line, 1, inputs, least=1),
            self._tokens(line, 2, outputs, least=0),
        )

    def _fail(self, line: int, column: int, text: str, rule: str) -> LogError:
        shown = text if len(text) <= 40 else text[:37] + "..."
        return LogError(f"{self._file}, line {line}, column {self._names[column]}: {shown!r} {rule}")

    def _number(self, line: int, column: int, text: str, scale: float) -> float:
        if not _is_number(text):
            raise self._fail(line, column, text, "is not a number")
        value = float(text) * scale
        if not math.isfinite(value):
            raise self._fail(line, column, text, "is not finite")
        if value < 0:
            raise self._fail(line, column, text, "is negative")
        if value > _MAX_ARRIVAL_MS:
            raise self._fail(line, column, text, f"is more than {_MAX_ARRIVAL_MS:.0f} ms")
        return value

    def _tokens(self, line: int, column: int, text: str, *, least: int) -> int:
        if not _is_number(text):
            raise self._fail(line, column, text, "is not a number")
        value = float(text)
        if not math.isfinite(value) or not value.is_integer():
            raise self._fail(line, column, text, "is not a whole number of tokens")
        if value < least:
            raise self._fail(line, column, text, f"is below {least}")
        if value > _MAX_TOKENS:
            raise self._fail(line, column, text, f"is more than {_MAX_TOKENS} tokens")
        return int(value)


def _shown(names: list[str]) -> str:
    """Names of columns for a message, which nobody reads if it is pages long."""
    cut = [name if len(name) <= 40 else name[:37] + "..." for name in names[:12]]
    return ", ".join(map(repr, cut)) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _is_number(text: str) -> bool:
    # Python also reads underscores and the digits of other scripts, which no log means.
    if not text.isascii() or "_" in text:
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True
