//! A cost table made ready for many questions.

use super::cost::CostTable;

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
    #[expect(clippy::cast_possible_truncation, reason = "not above `n`")]
    #[inline]
    pub(super) fn narrow(self, n: u64) -> u64 {
        ((u128::from(n) * u128::from(self.factor)) >> 63) as u64
    }

    /// `tokens / by`, rounded up.
    #[inline]
    pub(super) fn blocks(self, tokens: i32) -> u64 {
        let above = u64::from(tokens.unsigned_abs()) + self.by - 1;
        match self.shift {
            Some(shift) => above >> shift,
            None => self.narrow(above),
        }
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
}

impl Prices {
    pub(super) fn of(table: &CostTable) -> Self {
        Self {
            tokens: Divisor::new(table.block_tokens),
            blocks: Divisor::new(table.block),
            block: table.block.into(),
            piece: table.piece.into(),
            whole: table.whole.into(),
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

    /// Blocks that a piece of cost `room` may have.
    #[inline]
    pub(super) fn most(&self, room: u64) -> u64 {
        self.blocks.wide(room.saturating_sub(self.piece))
    }
}

/// The rows of a batch, before folding.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Survey {
    /// Rows that are not empty.
    pub(super) live: u64,
    pub(super) blocks: u64,
    /// Blocks of the longest row.
    pub(super) longest: u64,
    /// Whether a row has a single block.
    pub(super) has_single: bool,
}

#[inline]
fn survey(kv_indptr: &[i32], blocks_of: impl Fn(u32) -> u32) -> Survey {
    let (mut live, mut blocks, mut longest, mut single) = (0_u64, 0_u64, 0_u32, 0_u64);
    for (&start, &end) in kv_indptr.iter().zip(&kv_indptr[1..]) {
        let row = blocks_of((end - start).unsigned_abs());
        live += u64::from(row != 0);
        single += u64::from(row == 1);
        blocks += u64::from(row);
        longest = longest.max(row);
    }
    Survey {
        live,
        blocks,
        longest: longest.into(),
        has_single: single > 0,
    }
}
