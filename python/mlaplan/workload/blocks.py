"""The KV block pool and the block table of the running requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class BlockPool:
    """Blocks 1 to `num_blocks - 1`, handed out last freed first, and a table of them by place.

    Freed blocks go to the next request at once and the table keeps what was written there, so whoever reads
    behind a request's blocks, or an old table, reads somebody else's tokens.

    Attributes:
        table: int32 (places, width), the blocks of each place in the order of their tokens.
        counts: int64 (places,), how many entries of each row are in use.
    """

    def __init__(self, num_blocks: int, places: int, width: int, block_size: int) -> None:
        self.table = np.zeros((places, width), dtype=np.int32)
        self.counts = np.zeros(places, dtype=np.int64)
        self._block_size = block_size
        self._free = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)
        self._num_free = num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that belong to nobody."""
        return self._num_free

    def grow(self, place: int, tokens: int) -> bool:
        """Gives a place the blocks for `tokens` tokens in all; False and no change when too few are free."""
        have = int(self.counts[place])
        more = -(-tokens // self._block_size) - have
        if more > self._num_free:
            return False
        if more > 0:
            self.table[place, have : have + more] = self._take(more)
            self.counts[place] = have + more
        return True

    def grow_many(self, places: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> bool:
        """The same for several places at once: all of them or none."""
        have = self.counts[places]
        more = np.maximum(-(-tokens // self._block_size) - have, 0)
        total = int(more.sum())
        if total > self._num_free:
            return False
        if total:
            of_place = np.repeat(np.arange(len(places)), more)
            within = np.arange(total) - np.repeat(np.cumsum(more) - more, more)
            self.table[places[of_place], have[of_place] + within] = self._take(total)
            self.counts[places] = have + more
        return True

    def release(self, place: int) -> None:
        """Takes back the blocks of a place."""
        count = int(self.counts[place])
        self._free[self._num_free : self._num_free + count] = self.table[place, :count][::-1]
        self._num_free += count
        self.counts[place] = 0

    def _take(self, count: int) -> npt.NDArray[np.int32]:
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count][::-1].copy()
