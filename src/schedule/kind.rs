//! Eight capacities that are tried at once, and which kind of walk over the tiles is enough for a batch.

use super::prices::Prices;

/// Capacities that are tried at once.
pub(super) const LANES: usize = 8;

/// A number per lane.
pub(super) type Lane = [i16; LANES];

/// What is tried: capacities, and what is known of the rows.
#[derive(Debug)]
pub(super) struct Trial<'a> {
    pub(super) kv_indptr: &'a [i32],
    pub(super) capacities: [u64; LANES],
    pub(super) slots: u64,
    /// Blocks of the shortest row that has any, and of the longest.
    pub(super) shortest: u64,
    pub(super) longest: u64,
}

/// What a walk need not ask. A tile *fits* if it does so in an empty slot, whole and as a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Every tile fits.
    Short,
    /// No tile fits an empty slot, neither whole nor as a piece.
    Long,
    /// Three quarters of the tiles fit, or three quarters are longer than any slot has room for: each is asked which.
    Mixed,
    Any,
    /// Any, of so many blocks that the quotient of one product may be too large by one.
    Wide,
}

impl Kind {
    /// The walk that asks the least; `None` where some tile does not fit and some slot has no room for a piece of two blocks.
    pub(super) fn of(trial: &Trial, prices: &Prices, [fits, largest]: [i16; 2], most: &Lane) -> Option<Self> {
        let [fits, largest, widest] = [fits, largest, most.iter().fold(0, |most, &lane| lane.max(most))]
            .map(|blocks| u64::try_from(blocks).unwrap_or(0));
        if trial.longest <= fits {
            return Some(Self::Short);
        }
        if most.iter().any(|&most| most < 2) {
            return None;
        }
        let tokens = |blocks: u64| i32::try_from(blocks * prices.block_tokens()).unwrap_or(i32::MAX);
        Some(if (trial.longest - 1) * widest >= 1 << 16 {
            Self::Wide
        } else if trial.shortest > largest {
            Self::Long
        } else if is_mixed(trial.kv_indptr, [fits, largest].map(tokens)) {
            Self::Mixed
        } else {
            Self::Any
        })
    }
}

/// Whether a quarter of the rows at most has more than `fits` tokens, or no more than `largest`.
///
/// Where both are many, in any order, what a branch saves is lost when it is not foreseen.
fn is_mixed(kv_indptr: &[i32], [fits, largest]: [i32; 2]) -> bool {
    let (mut above, mut within) = (0_i32, 0_i32);
    for (start, end) in kv_indptr.iter().zip(&kv_indptr[1..]) {
        above += i32::from(end - start > fits);
        within += i32::from(end - start <= largest);
    }
    above.min(within).unsigned_abs() as usize <= kv_indptr.len() / 4
}
