"""Request logs: every form that is read, and an error that names the place for every one that is not."""

from __future__ import annotations

import gzip
import itertools
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from mlaplan.workload import LogError, Request, generated_log, read_log

_HEADER = b"arrival_ms,input_tokens,output_tokens\n"


def _write(folder: Path, data: bytes, name: str = "log.csv") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "data",
    [
        _HEADER + b"0,10,3\n12.5,20,4\n",
        b"0,10,3\n12.5,20,4\n",
        b"0,10,3\r\n12.5,20,4",
        b"\xef\xbb\xbf" + _HEADER + b"0,10,3\n12.5,20,4\n",
        b"\n  \n0,10,3\n\n12.5,20,4\n,,\n",
        b"id,output_tokens,Input_Tokens,ARRIVAL_MS\na,3,10,0\nb,4,20,12.5\n",
        b"arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,3\n0.0125,20,4\n",
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n0,10,3\n12.5,20,4\n",
        b"timestamp,input_length,output_length\n0,10,3\n12.5,20,4\n",
        b' "0" , 10 ,3.0\n1.25e1,2e1,4\n'.replace(b' "0" ', b'"0"'),
    ],
)
def test_a_log_is_read_in_every_usual_form(tmp_path: Path, data: bytes) -> None:
    want = [Request(0.0, 10, 3), Request(12.5, 20, 4)]
    assert list(read_log(_write(tmp_path, data))) == want
    assert list(read_log(str(_write(tmp_path, gzip.compress(data), "log.csv.gz")))) == want


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds no requests"),
        (b"\n\n", "holds no requests"),
        (_HEADER, "holds no requests"),
        (_HEADER + b"0,10,3\n-1,10,3\n", "line 3, column arrival_ms: '-1' is negative"),
        (_HEADER + b"0,-10,3\n", "line 2, column input_tokens: '-10' is below 1"),
        (_HEADER + b"0,0,3\n", "line 2, column input_tokens: '0' is below 1"),
        (_HEADER + b"0,10,-3\n", "line 2, column output_tokens: '-3' is below 0"),
        (_HEADER + b"0,ten,3\n", "line 2, column input_tokens: 'ten' is not a number"),
        (_HEADER + b"0,10,\n", "line 2, column output_tokens: '' is not a number"),
        (_HEADER + b"soon,10,3\n", "line 2, column arrival_ms: 'soon' is not a number"),
        (_HEADER + b"nan,10,3\n", "line 2, column arrival_ms: 'nan' is not finite"),
        (_HEADER + b"inf,10,3\n", "line 2, column arrival_ms: 'inf' is not finite"),
        (_HEADER + b"1e400,10,3\n", "line 2, column arrival_ms: '1e400' is not finite"),
        (_HEADER + b"1e30,10,3\n", "line 2, column arrival_ms: '1e30' is more than"),
        (_HEADER + b"0,nan,3\n", "line 2, column input_tokens: 'nan' is not a whole number"),
        (_HEADER + b"0,10.5,3\n", "line 2, column input_tokens: '10.5' is not a whole number"),
        (_HEADER + b"0,2147483648,3\n", "line 2, column input_tokens: '2147483648' is more than 2147483647"),
        (_HEADER + b"0,10," + b"9" * 5000 + b"\n", r"line 2, column output_tokens: '9{37}\.\.\.'"),
        (_HEADER + b"0,1_000,3\n", "line 2, column input_tokens: '1_000' is not a number"),
        (_HEADER + "0,١٢,3\n".encode(), "line 2, column input_tokens: '١٢' is not a number"),
        (_HEADER + b"0,0x10,3\n", "line 2, column input_tokens: '0x10' is not a number"),
        (_HEADER + b"0,10,3\n5,10,3\n4,10,3\n", "line 4: arrival goes backwards, from 5 ms to 4 ms"),
        (_HEADER + b"0,10\n", "line 2: 2 columns, expected 3"),
        (_HEADER + b"0,10,3,4\n", "line 2: 4 columns, expected 3"),
        (b"1,2\n", "line 1: 2 columns, expected 3"),
        (b"1;2;3\n", "line 1: no arrival column among '1;2;3'"),
        (b"when,input_tokens,output_tokens\n", "line 1: no arrival column"),
        (b"arrival_ms,size,output_tokens\n", "line 1: no input column"),
        (b"arrival_ms,input_tokens\n", "line 1: no output column"),
        (b"arrival_ms,timestamp,input_tokens,output_tokens\n", "line 1: more than one arrival column"),
        (_HEADER + b'0,"10,3\n', "not CSV"),
        (_HEADER + b"0," + b"1" * 200_000 + b",3\n", "line 2: more than 65536 characters in one entry"),
        (_HEADER + b"0,10,3\n1,\xff,3\n", "byte 0xff is not UTF-8"),
        ("arrival_ms,input_tokens,output_tokens\n".encode("utf-16"), "byte 0xff is not UTF-8"),
        (_HEADER + b"0,10,3\n0,\x00,3\n", "line 3"),
    ],
)
def test_a_bad_log_is_refused_with_its_place(tmp_path: Path, data: bytes, message: str) -> None:
    path = _write(tmp_path, data)
    with pytest.raises(LogError, match=message) as caught:
        list(read_log(path))
    assert str(caught.value).startswith(str(path))


def test_requests_before_a_bad_line_come_out(tmp_path: Path) -> None:
    requests = read_log(_write(tmp_path, _HEADER + b"0,10,3\n1,x,3\n"))
    assert next(requests) == Request(0.0, 10, 3)
    with pytest.raises(LogError, match="line 3"):
        next(requests)


@pytest.mark.parametrize("cut", [1, 5, 30, -1, -9])
def test_a_damaged_gzip_file_is_refused(tmp_path: Path, cut: int) -> None:
    whole = gzip.compress(_HEADER + b"".join(b"%d,10,3\n" % line for line in range(5000)))
    path = _write(tmp_path, whole[:cut], "log.csv.gz")
    with pytest.raises(LogError, match="damaged gzip file"):
        list(read_log(path))


def test_a_flipped_byte_in_a_gzip_file_is_noticed(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(_HEADER + b"".join(b"%d,10,3\n" % line for line in range(5000))))
    whole[-6] ^= 1  # the checksum
    with pytest.raises(LogError, match="damaged gzip file"):
        list(read_log(_write(tmp_path, bytes(whole), "log.csv.gz")))


def test_plain_text_called_gz_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="damaged gzip file"):
        list(read_log(_write(tmp_path, _HEADER + b"0,10,3\n", "log.csv.gz")))


def test_what_is_not_a_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        read_log(tmp_path / "missing.csv")
    with pytest.raises(IsADirectoryError, match="is a directory"):
        read_log(tmp_path)
    with pytest.raises(LogError, match="not a regular file"):
        read_log(os.devnull)


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    path = _write(tmp_path, b"".join(b"%d,1000,300\n" % line for line in range(100_000)))
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_log(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 100_000
    assert peak < 500_000  # the file is 1.7 MB, its requests ten times that


def test_real_logs_are_read_whole(shared: Path) -> None:
    for name, rows in (("mooncake_conversation", 12_031), ("azure_conv_2023", 19_366)):
        assert sum(1 for _ in read_log(shared / "data" / f"{name}.csv")) == rows


def test_a_generated_log_is_determined_by_its_seed() -> None:
    assert list(generated_log(3, 700)) == list(generated_log(3, 700))
    assert list(generated_log(3, 700)) != list(generated_log(4, 700))
    # Lazy, and a longer log begins with the shorter one.
    assert list(itertools.islice(generated_log(3), 300)) == list(generated_log(3, 300))
    assert list(generated_log(3, 0)) == []


def test_a_generated_log_has_lengths_on_both_sides_of_topk_and_keeps_its_rate() -> None:
    requests = list(generated_log(0, 4000, requests_per_second=5.0))
    arrivals = np.array([request.arrival_ms for request in requests])
    inputs = np.array([request.input_tokens for request in requests])
    outputs = np.array([request.output_tokens for request in requests])
    assert (np.diff(arrivals) >= 0).all()
    assert inputs.min() >= 1
    assert outputs.min() >= 1
    for kind in (inputs + outputs < 2048, (inputs < 2048) & (inputs + outputs > 2048), inputs > 2048):
        assert kind.mean() > 0.05
    # 4,000 exponential gaps: the standard error of the mean is below 2.5%.
    assert arrivals[-1] / 4000 == pytest.approx(200.0, rel=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"num_requests": -1}, "num_requests is -1"),
        ({"requests_per_second": 0.0}, "requests_per_second is 0.0"),
        ({"median_input": float("nan")}, "median_input is nan"),
        ({"long_share": 1.1}, "long_share is 1.1"),
        ({"max_output": 0}, "max_output 0"),
    ],
)
def test_a_wrong_setting_of_a_generated_log_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generated_log(**change)  # type: ignore[arg-type]
