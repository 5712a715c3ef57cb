"""Log files that no engine wrote: reader and command refuse each with its name and place, in one line.

Kinds that `test_log.py` has are not repeated here.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import socket
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from mlaplan import cli
from mlaplan.workload import LogError, Request, read_log

HEADER = b"arrival_ms,input_tokens,output_tokens\n"
GOOD = HEADER + b"0,10,3\n12.5,20,4\n"
MANY = HEADER + b"".join(b"0,%d,1\n" % (number % 11 + 1) for number in range(1500))
# Enough steps to come to the end of all of them.
RUN = ("--device", "cpu", "--steps", "60", "--decode-every", "0", "--check-every", "0", "--max-num-seqs", "256",
       "--max-num-batched-tokens", "512", "--topk", "64", "--num-cus", "4")  # fmt: skip


def zipped() -> bytes:
    """A zip archive with a log in it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("log.csv", GOOD)
    return stream.getvalue()


def deflated(data: bytes, *, wrapper: int = 31) -> bytes:
    """Compressed data; 31 for gzip, 15 for zlib, -15 for neither."""
    machine = zlib.compressobj(9, zlib.DEFLATED, wrapper)
    return machine.compress(data) + machine.flush()


def spoiled(data: bytes, place: int, value: int = 0xFF) -> bytes:
    """The data with one byte turned over."""
    changed = bytearray(data)
    changed[place] ^= value
    return bytes(changed)


def line(text: str | bytes) -> bytes:
    """A log whose second line is the text."""
    return HEADER + (text if isinstance(text, bytes) else text.encode()) + b"\n"


# What the file holds, and words of the message. Names say what kind it is.
TEXTS: dict[str, tuple[bytes, str]] = {
    "utf-16 little-endian without a mark": (GOOD.decode().encode("utf-16-le"), "no arrival column"),
    "utf-16 big-endian": (b"\xfe\xff" + GOOD.decode().encode("utf-16-be"), "0xfe is not UTF-8"),
    "utf-32": (GOOD.decode().encode("utf-32"), "0xff is not UTF-8"),
    "latin-1 in a further column": (b"arrival_ms,input_tokens,output_tokens,caf\xe9\n0,1,1,x\n", "0xe9 is not UTF-8"),
    "overlong zero": (line(b"0,1\xc0\x80,3"), "0xc0 is not UTF-8"),
    "half of a surrogate pair": (line(b"0,\xed\xa0\x80,3"), "0xed is not UTF-8"),
    "a character cut off by the end": (GOOD + b"13,1\xe2\x82", "0xe2 is not UTF-8"),
    "two byte order marks": (b"\xef\xbb\xbf" * 2 + GOOD, "no arrival column"),
    "a byte order mark inside": (line(b"\xef\xbb\xbf0,10,3"), "line 2, column arrival_ms: '\\ufeff0' is not a number"),
    "a hole of zeros, as in a sparse file": (GOOD + bytes(4096), "line 4"),
    "nothing but zeros": (bytes(512), "line 1"),
    "html": (b"<html>\n<body>not found</body></html>\n", "line 1: no arrival column among '<html>'"),
    "json": (b'{"arrival_ms": 0, "input_tokens": 10}\n', "line 1: "),
    "json lines": (b'["arrival_ms","input_tokens"]\n[0,10]\n', "line 1: "),
    "yaml": (b"- arrival_ms: 0\n  input_tokens: 10\n", "line 1: no arrival column"),
    "tabs between columns": (GOOD.replace(b",", b"\t"), "no arrival column"),
    "pipes between columns": (GOOD.replace(b",", b"|"), "no arrival column"),
    "a comment in front": (b"# made by a script\n" + GOOD, "line 1: no arrival column among '# made by a script'"),
    "a comment inside": (line("# end"), "line 2: 1 columns, expected 3"),
    "parquet": (b"PAR1" + bytes(range(256)), "is not UTF-8"),
    "an executable": (b"\x7fELF\x02\x01\x01" + bytes(64), "line 1"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(64), "0x89 is not UTF-8"),
    "gzip without its ending": (gzip.compress(GOOD), "0x8b is not UTF-8"),
    "bzip2": (bz2.compress(GOOD), "is not UTF-8"),
    "xz": (lzma.compress(GOOD), "is not UTF-8"),
    "zip": (zipped(), "is not UTF-8|line 1"),
    "the header twice": (line(HEADER.strip()), "line 2, column arrival_ms: 'arrival_ms' is not a number"),
    "the header behind the data": (b"0,10,3\n" + HEADER, "line 2, column arrival_ms"),
    "two columns of one name": (b"arrival_ms,input_tokens,input_tokens,output_tokens\n", "more than one input column"),
    "two columns of one meaning": (b"arrival_ms,prompt_tokens,input_length,output_tokens\n", "more than one input"),
    "arrival in two units": (b"arrival_ms,arrival_s,input_tokens,output_tokens\n", "more than one arrival column"),
    "names that are empty": (b'"","x",""\n0,1,1\n', "line 1: no arrival column among '', 'x', ''"),
    "a comma behind each line": (line("0,10,3,"), "line 2: 4 columns, expected 3"),
    "a decimal comma": (line("0,5,10,3"), "line 2: 4 columns, expected 3"),
    "a decimal comma in quotes": (line('"0,5",10,3'), "column arrival_ms: '0,5' is not a number"),
    "a thousands comma": (line('0,"1,024",3'), "column input_tokens: '1,024' is not a number"),
    "a quote inside a number": (line('0,"1"0,3'), "line 2: not CSV"),
    "a quote that the file's end leaves open": (line('0,10,"3'), "not CSV"),
    "a line end inside a number": (line('0,"1\n0",3'), "column input_tokens"),
    "single quotes": (line("0,'10',3"), "column input_tokens: \"'10'\" is not a number"),
    "a time of day": (line("18:15:46,10,3"), "column arrival_ms: '18:15:46' is not a number"),
    "a date": (line("2023-11-16 18:15:46.68,10,3"), "column arrival_ms: '2023-11-16 18:15:46.68' is not a number"),
    "a unit": (line("0,10 tokens,3"), "column input_tokens: '10 tokens' is not a number"),
    "a word for nothing": (line("0,None,3"), "column input_tokens: 'None' is not a number"),
    "a spreadsheet's error": (line("0,#N/A,3"), "column input_tokens: '#N/A' is not a number"),
    "full-width digits": (line("0,\uff11\uff10,3"), "is not a number"),
    "a fraction as one character": (line("0,\u00bd,3"), "is not a number"),
    "a minus sign of typography": (line("0,\u22125,3"), "is not a number"),
    "a hyphen alone": (line("0,-,3"), "column input_tokens: '-' is not a number"),
    "binary digits": (line("0,0b10,3"), "column input_tokens: '0b10' is not a number"),
    "an exponent without a number": (line("0,e5,3"), "column input_tokens: 'e5' is not a number"),
    "tokens beyond a float": (line("0,1e400,3"), "column input_tokens: '1e400' is not a whole number"),
    "tokens that are infinite": (line("0,10,-Infinity"), "column output_tokens: '-Infinity' is not a whole number"),
    "tokens that are no number by name": (line("0,NaN,3"), "column input_tokens: 'NaN' is not a whole number"),
    "half a token": (line("0,10,2.5"), "column output_tokens: '2.5' is not a whole number"),
    "nearly no token": (line("0,1e-9,3"), "column input_tokens: '1e-9' is not a whole number"),
    "one token beyond 31 bits": (line("0,2147483648,3"), "'2147483648' is more than 2147483647"),
    "tokens beyond 64 bits": (line("0,10,18446744073709551616"), "'18446744073709551616' is more"),
    "a number of 50,000 digits": (line("0," + "9" * 50_000 + ",3"), "column input_tokens: '9999"),
    "arrival beyond a float's milliseconds": (line("1e16,10,3"), "'1e16' is more than 9007199254740"),
    "seconds whose milliseconds overflow": (HEADER.replace(b"_ms", b"_s") + b"1e308,1,1\n", "'1e308' is not finite"),
    "arrival a little backwards": (HEADER + b"5,10,3\n4.999999,10,3\n", "line 3: arrival goes backwards"),
    "terminal escapes": (line(b"0,\x1b[2J\x1b[1;1H,3"), "column input_tokens: '\\x1b[2J\\x1b[1;1H' is not a number"),
    "a column of control characters": (b"arrival_ms,in\x07put\n", "no input column among 'arrival_ms', 'in\\x07put'"),
    "an entry of 65,537 characters": (line("0,10," + "3" * 65_532), "line 2: more than 65536 characters in one entry"),
    "a hundred thousand columns": (b"a," * 30_000 + b"b\n", "among 'a', 'a'"),
    "quoted line ends without end": (HEADER + b'0,10,"' + b"\n" * 70_000, "more than 65536 characters in one entry"),
    "columns of line ends without end": (HEADER + b'"\n","\n",' * 9000 + b"\n", "more than 65536 characters"),
}  # fmt: skip

WHOLE = gzip.compress(MANY, mtime=0)
ZIPPED: dict[str, tuple[bytes, str]] = {
    "an empty file called gz": (b"", "holds no requests"),
    "a header of gzip alone": (WHOLE[:10], "damaged gzip file"),
    "a header cut in its name": (b"\x1f\x8b\x08\x08\x00\x00\x00\x00\x00\x03log", "damaged gzip file"),
    "another method of compression": (spoiled(WHOLE, 2, 0x0F), "damaged gzip file"),
    "a checksum cut off": (WHOLE[:-8], "damaged gzip file"),
    "a length cut in half": (WHOLE[:-2], "damaged gzip file"),
    "a length that is wrong": (spoiled(WHOLE, -1), "damaged gzip file"),
    "a checksum that is wrong": (spoiled(WHOLE, -8), "damaged gzip file"),
    "a flipped byte in the middle": (spoiled(WHOLE, len(WHOLE) // 2), "line |damaged gzip file"),
    "a second member that is damaged": (WHOLE + WHOLE[:40], "damaged gzip file"),
    "rubbish behind the end": (WHOLE + b"rubbish", "damaged gzip file"),
    "zlib instead of gzip": (deflated(MANY, wrapper=15), "damaged gzip file"),
    "deflate without a frame": (deflated(MANY, wrapper=-15), "damaged gzip file"),
    "bzip2 called gz": (bz2.compress(MANY), "damaged gzip file"),
    "zip called gz": (zipped(), "damaged gzip file"),
    "gzip twice": (gzip.compress(WHOLE), "is not UTF-8"),
    "utf-16 in gzip": (gzip.compress(GOOD.decode().encode("utf-16")), "0xff is not UTF-8"),
}  # fmt: skip

# Some kilobytes that are megabytes when they are decompressed: what repeats, how often, and the message.
BOMBS: dict[str, tuple[bytes, int, str]] = {
    "one line": (b"7", 50_000_000, "line 1: more than 65536 characters in one entry"),
    "one line in quotes": (b'"' + b"7\n" * 20, 1_000_000, "more than 65536 characters in one entry|not CSV"),
    "columns": (b"1,", 20_000_000, "line 1: more than 65536 characters in one entry"),
    "blank lines": (b"\n", 150_000, "holds no requests"),
}

# Odd, and right all the same.
READ: dict[str, bytes] = {
    "old line ends": GOOD.replace(b"\n", b"\r"),
    "a mark, foreign line ends, no last one": (b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n")).rstrip(),
    "every cell in quotes": b'"arrival_ms","input_tokens","output_tokens"\n"0","10","3"\n"12.5","20","4"\n',
    "plus signs and exponents": HEADER + b"+0,+1e1,3\n1.25e1,2E1,4.0\n",
    "blank lines behind": GOOD + b"\n \n,,\n" * 50,
    "spaces around": HEADER + b" 0 , 10,3 \n12.5,\t20,4\n",
    "a long further column": b"arrival_ms,input_tokens,output_tokens,note\n0,10,3," + b"x" * 60_000 + b"\n12.5,20,4,\n",
    "line ends in a further column": b'arrival_ms,input_tokens,output_tokens,note\n0,10,3,"a\n\nb"\n12.5,20,4,"\r\n"\n',
    "another script in a further column": "arrival_ms,input_tokens,output_tokens,名\n0,10,3,é\n12.5,20,4,\n".encode(),
}


def refused(capsys: pytest.CaptureFixture[str], path: Path, message: str) -> str:
    """Reads a log with the reader and the command; both must say the same of it. Returns what they said."""
    with pytest.raises((LogError, OSError)) as caught:
        list(read_log(path))
    folder = path.parent
    before = sorted(folder.iterdir())
    status = cli.main(["run", str(path), *RUN])
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert printed.err == f"mlaplan run: error: {caught.value}\n"
    assert printed.err.count("\n") == 1
    assert len(printed.err) < 1200
    assert printed.err.isprintable() or printed.err.strip("\n").isprintable()
    assert sorted(folder.iterdir()) == before
    assert str(path) in printed.err
    assert any(part in printed.err for part in message.split("|")), printed.err
    return printed.err


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_that_is_no_log_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    data, message = TEXTS[kind]
    path = tmp_path / "log.csv"
    path.write_bytes(data)
    refused(capsys, path, message)


@pytest.mark.parametrize("kind", ZIPPED)
def test_a_compressed_file_that_is_no_log_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str
) -> None:
    data, message = ZIPPED[kind]
    path = tmp_path / "log.csv.gz"
    path.write_bytes(data)
    refused(capsys, path, message)


@pytest.mark.parametrize("kind", READ)
def test_an_odd_log_that_is_right_is_read(tmp_path: Path, kind: str) -> None:
    for name, data in (("log.csv", READ[kind]), ("log.csv.gz", gzip.compress(READ[kind]))):
        path = tmp_path / name
        path.write_bytes(data)
        assert list(read_log(path)) == [Request(0.0, 10, 3), Request(12.5, 20, 4)]


def test_two_members_and_padding_are_one_log(tmp_path: Path) -> None:
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(GOOD) + gzip.compress(b"20,5,1\n") + bytes(512))
    assert [request.input_tokens for request in read_log(path)] == [10, 20, 5]


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_refused_and_takes_no_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    data, times, message = BOMBS[kind]
    path = tmp_path / "log.csv.gz"
    path.write_bytes(deflated(data * times))
    refused(capsys, path, message)
    tracemalloc.start()
    try:
        with pytest.raises(LogError):
            list(read_log(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (3_000_000 if len(data) * times > 10_000_000 else 300_000)


def fifo(path: Path) -> None:
    """A pipe that nobody writes to: opening it would wait for ever."""
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    """A socket's name."""
    here = Path.cwd()
    os.chdir(path.parent)  # an address is 100 characters long at most
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link to itself": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "a link to nothing": (lambda path: path.symlink_to("gone.csv"), "No such file"),
    "a link to a folder": (lambda path: path.symlink_to("."), "is a directory"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
    "a pipe": (fifo, "is not a regular file"),
    "a socket": (unix_socket, "is not a regular file"),
    "a folder": (lambda path: path.mkdir(), "is a directory"),
    "a link to a file that cannot be read": (lambda path: path.symlink_to("/proc/self/mem"), "Input/output error"),
}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
def test_a_place_that_is_no_file_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, name: str
) -> None:
    make, message = PLACES[kind]
    make(tmp_path / name)
    refused(capsys, tmp_path / name, message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x" * 300, "File name too long"),
        ("file/log.csv", "Not a directory"),
        ("gone/log.csv", "No such file"),
        ("\u202egnp.csv", "No such file"),
    ],
)
def test_a_name_that_no_file_has_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "file").write_bytes(GOOD)
    with pytest.raises(OSError, match=message):
        read_log(tmp_path / name)
    assert cli.main(["run", str(tmp_path / name), *RUN]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_zero_byte_in_a_name_is_refused() -> None:
    with pytest.raises(LogError, match="no file name"):
        read_log("a\0b.csv")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(GOOD)
    path.chmod(0)
    refused(capsys, path, "Permission denied")


def test_a_link_to_a_log_and_a_log_called_anything_are_read(tmp_path: Path) -> None:
    name = os.fsdecode(b"odd \xff\n'\"$(x).csv")
    (tmp_path / name).write_bytes(GOOD)
    (tmp_path / "link").symlink_to(name)
    assert len(list(read_log(tmp_path / name))) == len(list(read_log(tmp_path / "link"))) == 2


def test_a_log_that_grows_or_shrinks_meanwhile_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(HEADER + b"0,1,1\n" * 40_000)
    requests = read_log(path)
    assert next(requests) == Request(0.0, 1, 1)
    os.truncate(path, 0)
    rest = sum(1 for _ in requests)  # what was read ahead
    assert rest < 40_000


def test_longest_entry_is_read_and_one_more_character_is_not(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    for longer, error in ((0, False), (1, True)):
        note = b"x" * (65_536 - len(b"0,10,3,\n") + longer)
        path.write_bytes(b"arrival_ms,input_tokens,output_tokens,note\n0,10,3," + note + b"\n")
        if error:
            with pytest.raises(LogError, match="more than 65536 characters in one entry"):
                list(read_log(path))
        else:
            assert list(read_log(path)) == [Request(0.0, 10, 3)]
