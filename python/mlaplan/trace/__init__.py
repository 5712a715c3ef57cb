"""Traces: what a planner was given and decided, step by step, in a file. `docs/traces.md` describes the format."""

from __future__ import annotations

from mlaplan.trace.file import VERSION, TraceReader, write_trace
from mlaplan.trace.header import Header
from mlaplan.trace.records import DumpRecord, EventRecord, Record, StepRecord, TraceError

__all__ = [
    "VERSION",
    "DumpRecord",
    "EventRecord",
    "Header",
    "Record",
    "StepRecord",
    "TraceError",
    "TraceReader",
    "write_trace",
]
