"""What is wrong with an array or a number, whatever argument it is given for."""

from __future__ import annotations

from typing import Any

import numpy as np

STRIDED = np.zeros(8, np.int32)[::2]
UNALIGNED = np.frombuffer(bytes(13), np.int32, count=3, offset=1)
BACKWARDS = np.zeros(3, ">i4")


class NoIndex:
    """Its number cannot be had."""

    def __index__(self) -> int:
        raise RuntimeError("no number")


# What is wrong with an array whatever its values: (what is given, error, words of the message).
ARRAYS: list[tuple[Any, type[Exception], str]] = [
    ([0, 2, 3], TypeError, "list"),
    ((0, 2), TypeError, "tuple"),
    (None, TypeError, "NoneType"),
    ("012", TypeError, "str"),
    (b"0123", TypeError, "bytes"),
    (7, TypeError, "int"),
    (np.int32(3), TypeError, "int32"),
    (memoryview(bytes(8)), TypeError, "memoryview"),
    (np.array([0, 2, 3]), TypeError, "int64"),
    (np.array([0, 2], np.uint32), TypeError, "uint32"),
    (np.array([0, 2], np.int16), TypeError, "int16"),
    (np.array([0.0, np.nan]), TypeError, "float64"),
    (np.array([False, True]), TypeError, "bool"),
    (np.array([0, None], object), TypeError, "object"),
    (np.zeros(3, "i4,i4"), TypeError, "dimensions"),
    (np.zeros(3, "m8[s]"), TypeError, "timedelta"),
    (BACKWARDS, TypeError, "dimensions"),
    (np.zeros((1, 3), np.int32), TypeError, "2 dimensions"),
    (np.zeros((), np.int32), TypeError, "0 dimensions"),
    (STRIDED, ValueError, "contiguous"),
    (np.zeros(4, np.int32)[::-1], ValueError, "contiguous"),
    (np.broadcast_to(np.zeros(1, np.int32), 3), ValueError, "contiguous"),
    (UNALIGNED, ValueError, "aligned"),
]

# The same for a whole number.
NUMBERS: list[tuple[Any, type[Exception], str]] = [
    (1.0, TypeError, "float"),
    (float("nan"), TypeError, "float"),
    (float("inf"), TypeError, "float"),
    (np.float32(2), TypeError, "float32"),
    (True, TypeError, "bool"),
    (np.bool_(True), TypeError, "bool"),
    ("8", TypeError, "str"),
    ([8], TypeError, "list"),
    (1 + 0j, TypeError, "complex"),
    (NoIndex(), TypeError, "NoIndex"),
    (2**63, ValueError, "9223372036854775808"),
    (-(2**63) - 1, ValueError, "-9223372036854775809"),
    (1 << 40_000, ValueError, ""),
    (-1 << 70, ValueError, "-1180591620717411303424"),
]
