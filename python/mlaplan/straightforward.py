"""A builder as one writes it first: lengths read back, rows in NumPy, a schedule launched when the key changed.

To compare with, see `mlaplan compare`. Its arrays hold what a planner's hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mlaplan.device.base import Counters
from mlaplan.layout import Layout, PlanArrays

if TYPE_CHECKING:
    from mlaplan.config import PlannerConfig
    from mlaplan.device import Device


class Straightforward:
    """Builds each step's plan in the order in which the numbers are needed.

    Attributes:
        arrays: The arrays of the last plan on the device, a class of their own for the largest batch.
        counters: What was asked of the device.
    """

    def __init__(self, config: PlannerConfig, device: Device) -> None:
        """Allocates the arrays.

        Args:
            config: Resolved settings.
            device: Where the arrays live.
        """
        self.counters = Counters()
        self._config = config
        self._params = config.params
        self._device = device
        params = self._params
        layout = Layout.of(config.max_rows, num_cus=params.num_cus, fold=params.fold, pieces=params.pieces)
        self.arrays = PlanArrays(
            *(device.view(device.allocate(int(np.prod(shape))), 0, shape) for shape in layout.shapes)
        )
        self._key: tuple[bytes, bytes] | None = None

    def build(self, query_start_loc: Any, device_query_start_loc: Any, device_seq_lens: Any) -> bool:
        """Builds the plan of a step.

        Args:
            query_start_loc: The host's boundaries. Shape (R + 1,), int32.
            device_query_start_loc: The device's. Shape (R + 1,), int32.
            device_seq_lens: The device's lengths. Shape (R,), int32.

        Returns:
            Whether the host must wait for the device before the plan may be used: a schedule was launched, and a graph
            that is replayed next does not know of it.
        """
        done, device, topk = self.counters, self._device, self._params.topk
        # The lengths are the device's, so this waits for everything that is queued in front of them.
        seq_lens = device.to_host(device_seq_lens)
        done.read_backs += 1
        queries = np.diff(query_start_loc)
        rows = int(query_start_loc[-1])
        request_ids = np.repeat(np.arange(queries.size, dtype=np.int32), queries)
        behind = np.repeat(query_start_loc[1:], queries) - 1 - np.arange(rows, dtype=np.int32)
        lengths = np.clip(np.repeat(seq_lens, queries) - behind, 0, topk)
        indptr = np.zeros(rows + 1, np.int32)
        np.cumsum(lengths, out=indptr[1:])
        for array, values in ((self.arrays.request_ids, request_ids), (self.arrays.kv_indptr, indptr)):
            device.store(array[: values.size], values)
            done.copies += 1
            done.bytes_copied += values.nbytes
        key = (query_start_loc.tobytes(), np.minimum(seq_lens, topk + queries - 1).tobytes())
        if key == self._key:
            return False
        device.plan(device_query_start_loc, device_seq_lens, self.arrays, self._params)
        done.launches += 1
        self._key = key
        return True
