//! A cost table made ready for many questions.

use super::cost::CostTable;
use super::demand::CHUNK;

/// Division by a number that stays the same, as a multiplication and a shift.
#[derive(Debug, Clone, Copy)]
pub(super) struct Divisor {
    pub(super) by: u64,
    factor: u64,
    /// The logarithm of `by`, where that is whole.
    shift: Option<u32>,
}

impl Divisor {
    /// `by` is in `1 ..= 2^31`.
    ///
    /// With the factor `f = floor(2^63 / by) + 1`, `f * by` is `2^63 + e` with `0 < e <= by`, so `n * f / 2^63` is
    /// `(n + n * e / 2^63) / by`. Its floor is that of `n / by` as long as `n * e < 2^63`, which holds for `n` below 2^32, and
    /// for any `n` below 2^39 where `by` is at most 2^24.
    pub(super) fn new(by: u32) -> Self {
        let by = u64::from(by);
        Self {
            by,
            factor: (1 << 63) / by + 1,
            shift: by.is_power_of_two().then(|| by.ilog2()),
        }
    }

    /// `n / by` for `n` below 2^32.
    #[inline]
    pub(super) fn narrow(self, n: u64) -> u64 {
        // Twice `n`, so that the upper half of the product is all there is to take.
        ((u128::from(2 * n) * u128::from(self.factor)) >> 64) as u64
    }

    /// `tokens / by`, rounded up.
    #[inline]
    pub(super) fn blocks(self, tokens: i32) -> u64 {
        self.narrow(u64::from(tokens.cast_unsigned()) + self.by - 1)
    }

    /// `n / by` for any `n`, if `by` is at most 2^24.
    #[inline]
    pub(super) fn wide(self, n: u64) -> u64 {
        if n < 1 << 39 { self.narrow(n) } else { n / self.by }
    }
}

/// A cost table made ready for many questions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prices {
    tokens: Divisor,
    blocks: Divisor,
    pub(super) block: u64,
    pub(super) piece: u64,
    pub(super) whole: u64,
    pub(super) cut: u64,
}

impl Prices {
    pub(super) fn of(table: &CostTable) -> Self {
        Self {
            tokens: Divisor::new(table.block_tokens),
            blocks: Divisor::new(table.block),
            block: table.block.into(),
            piece: table.piece.into(),
            whole: table.whole.into(),
            cut: table.cut.into(),
        }
    }

    /// Cost of a work of `tokens` tokens.
    #[inline]
    pub(super) fn work(&self, tokens: i32, is_whole: bool) -> u64 {
        self.blocks(tokens) * self.block + if is_whole { self.whole } else { self.piece }
    }

    /// Blocks that `tokens` tokens touch.
    #[inline]
    pub(super) fn blocks(&self, tokens: i32) -> u64 {
        self.tokens.blocks(tokens)
    }

    /// Sums up the rows that an ordered `kv_indptr` bounds.
    pub(super) fn survey(&self, kv_indptr: &[i32]) -> Survey {
        match self.tokens.shift {
            // Twice the same, for without a product of 128 bits it is vectorised.
            Some(shift) => {
                let less = (1 << shift) - 1;
                survey(kv_indptr, |tokens| (tokens + less) >> shift)
            }
            None => survey(kv_indptr, |tokens| {
                u32::try_from(self.blocks(tokens.cast_signed())).unwrap_or(u32::MAX)
            }),
        }
    }

    /// Tokens of a block.
    pub(super) fn block_tokens(&self) -> u64 {
        self.tokens.by
    }

    /// Tokens in `blocks` whole blocks that lie inside a row.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "less than the row's length, which is an i32"
    )]
    #[inline]
    pub(super) fn tokens(&self, blocks: u64) -> i32 {
        (blocks * self.tokens.by) as i32
    }

    /// Blocks that so much pays for.
    #[inline]
    pub(super) fn in_blocks(&self, cost: u64) -> u64 {
        self.blocks.wide(cost)
    }

    /// A cost of less than 2^63 less a block either way, as blocks rounded down and the rest.
    #[inline]
    pub(super) fn parts(&self, cost: i64) -> Parts {
        let block = self.block.cast_signed();
        let up = |cost: i64| self.in_blocks(cost.cast_unsigned()).cast_signed();
        let blocks = if cost < 0 { -up(block - 1 - cost) } else { up(cost) };
        Parts {
            blocks,
            rest: cost - blocks * block,
        }
    }
}

/// A cost as `blocks * block + rest` with `0 <= rest < block`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parts {
    pub(super) blocks: i64,
    pub(super) rest: i64,
}

/// The rows of a batch, before folding.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Survey {
    pub(super) blocks: u64,
    /// Blocks of the longest row.
    pub(super) longest: u64,
    /// Blocks of the shortest row that has any.
    pub(super) shortest: u64,
}

#[inline]
fn survey(kv_indptr: &[i32], blocks_of: impl Fn(u32) -> u32) -> Survey {
    let mut all = Survey::default();
    // The least of those that have any is that of all less one, where none is then the most.
    let mut shortest = u32::MAX;
    // The sums of a chunk fit 32 bits: all rows together have less than 2^31 tokens, and a row no more blocks.
    for (starts, ends) in kv_indptr.chunks(CHUNK).zip(kv_indptr[1..].chunks(CHUNK)) {
        let (mut blocks, mut longest, mut least) = (0_u32, 0_i32, i32::MAX);
        for (&start, &end) in starts.iter().zip(ends) {
            let row = blocks_of((end - start).cast_unsigned());
            blocks += row;
            longest = longest.max(row.cast_signed());
            least = least.min((row.wrapping_sub(1) & 0x7fff_ffff).cast_signed());
        }
        all.blocks += u64::from(blocks);
        all.longest = all.longest.max(longest.unsigned_abs().into());
        shortest = shortest.min(least.unsigned_abs());
    }
    all.shortest = u64::from(shortest) + 1;
    all
}
