//! What works cost on a kernel.

use crate::support::{Arch, Dtype};
use crate::{PlanError, Rule};

/// Largest cost that a policy takes: sums over every row that can be planned then fit 63 bits.
pub const MAX_COST: u32 = 1 << 24;

/// What works cost on a kernel. A work costs a fixed amount and so much per block that it touches; a slot costs a fixed
/// amount whether it has works or not.
///
/// Costs are integers in tenths of an instruction per wave (in planner blocks for [`CostTable::AITER`]). Integers, because the
/// measured figures are exact in tenths, sums do not depend on their order, and a finish time can be compared with
/// a bound without a tolerance. Only ratios mean anything across tables.
///
/// The figures other than [`CostTable::AITER`] are counts from executing aiter's decode kernels in an emulator of the
/// instruction set. They are not times. `merge` was not counted, it is assumed: see [`CostTable::merge`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CostTable {
    /// KV tokens that the kernel takes at once; a shorter rest costs as much. 0 counts as 1.
    pub block_tokens: u32,
    /// Cost of a block.
    pub block: u32,
    /// Fixed cost of a work that is a piece of a cut row.
    pub piece: u32,
    /// Fixed cost of a work that is a whole row.
    pub whole: u32,
    /// Fixed cost of a slot.
    pub slot: u32,
    /// Cost of merging one piece of a cut row. It is not part of a slot's cost, for the merge runs behind all of them; it
    /// weighs the number of pieces when a split budget is chosen.
    ///
    /// In the tables of aiter's kernels it is an assumption: each head of a row is merged by a work-group of its own, all at
    /// once, and a piece costs it the 2 KiB that are written (512 values of 32 bits) and read back, at the price that the
    /// decode pays for the bytes of a block: `block * 4096 / (block_tokens * bytes of a token's KV)`.
    pub merge: u32,
    /// Cost of having anything to merge, however much it is. It weighs once per batch, where a schedule that cuts rows is
    /// compared with one that cuts none, and where a split budget is chosen.
    ///
    /// In the tables of aiter's kernels it is 0, which is an assumption: its merge is launched either way.
    pub cut: u32,
}

impl CostTable {
    /// What aiter's planner assumes for every kernel, in blocks of 16 tokens.
    pub const AITER: Self = Self {
        block_tokens: 16,
        block: 1,
        piece: 16,
        whole: 16,
        slot: 0,
        merge: 0,
        cut: 0,
    };
    /// bf16 query and KV, 16 heads, gfx942 and gfx950.
    pub const BF16_HEADS_16: Self = Self::counted(16, 3115, 11_330, 15_460, 2);
    /// bf16 query, fp8 KV, 16 heads, gfx942.
    pub const BF16_FP8_HEADS_16: Self = Self::counted(16, 3315, 11_340, 15_470, 1);
    /// fp8 query and KV, 16 heads, gfx942.
    pub const GFX942_FP8_HEADS_16: Self = Self::counted(64, 3435, 8920, 10_040, 1);
    /// fp8 query and KV, 64 heads, gfx942.
    pub const GFX942_FP8_HEADS_64: Self = Self::counted(32, 6465, 16_580, 20_770, 1);
    /// fp8 query and KV, 128 heads, gfx942.
    pub const GFX942_FP8_HEADS_128: Self = Self::counted(32, 6325, 20_900, 29_300, 1);
    /// bf16 query and KV, 64 heads, gfx950.
    pub const GFX950_BF16_HEADS_64: Self = Self::counted(32, 3657, 17_360, 16_470, 2);

    const fn counted(block_tokens: u32, block: u32, piece: u32, whole: u32, kv_bytes: u32) -> Self {
        // 512 values of the compressed KV and 64 of the rotary part.
        let bytes = block_tokens * 576 * kv_bytes;
        Self {
            block_tokens,
            block,
            piece,
            whole,
            slot: 310,
            merge: block * 4096 / bytes,
            cut: 0,
        }
    }

    /// Cost of a work of `tokens` tokens, `whole` if it is a whole row.
    pub fn work(&self, tokens: u32, whole: bool) -> u64 {
        let fixed = if whole { self.whole } else { self.piece };
        self.blocks(tokens) * u64::from(self.block) + u64::from(fixed)
    }

    /// Blocks that `tokens` tokens touch.
    pub fn blocks(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(self.block_tokens.max(1)))
    }

    /// The most tokens that touch as many blocks as these.
    pub(crate) fn whole_blocks(&self, tokens: i32) -> i32 {
        let tokens = tokens.max(0).unsigned_abs();
        i32::try_from(self.blocks(tokens) * u64::from(self.block_tokens)).unwrap_or(i32::MAX)
    }

    /// Checks that a policy can place works by this table.
    ///
    /// # Errors
    ///
    /// [`PlanError::Number`] if `block_tokens` is not in `1 ..= i32::MAX`, a cost is above [`MAX_COST`], `block` is 0, or
    /// `piece` is above `whole + block`: cutting one block off a row must not make the rest dearer than the row was.
    pub fn validate(&self) -> Result<(), PlanError> {
        let check = |argument, value: u32, least: u32, most: u32| {
            let rule = if value < least {
                Rule::AtLeast(least.into())
            } else if value > most {
                Rule::AtMost(most.into())
            } else {
                return Ok(());
            };
            let value = value.into();
            Err(PlanError::Number {
                argument,
                value,
                rule,
            })
        };
        check("block_tokens", self.block_tokens, 1, i32::MAX.unsigned_abs())?;
        check("block", self.block, 1, MAX_COST)?;
        check("whole", self.whole, 0, MAX_COST)?;
        check("slot", self.slot, 0, MAX_COST)?;
        check("merge", self.merge, 0, MAX_COST)?;
        check("cut", self.cut, 0, MAX_COST)?;
        check("piece", self.piece, 0, MAX_COST.min(self.whole + self.block))
    }
}

/// Returns what works cost on the kernel that takes `heads` query heads (per tile, that is after folding), or `None` for
/// a kernel whose instructions were not counted.
pub fn cost_table(arch: Arch, heads: usize, q: Dtype, kv: Dtype) -> Option<CostTable> {
    Some(match (arch, heads, q, kv) {
        // Both families run the same code.
        (_, 16, Dtype::Bf16, Dtype::Bf16) => CostTable::BF16_HEADS_16,
        (Arch::Gfx942, 16, Dtype::Bf16, Dtype::Fp8) => CostTable::BF16_FP8_HEADS_16,
        (Arch::Gfx942, 16, Dtype::Fp8, Dtype::Fp8) => CostTable::GFX942_FP8_HEADS_16,
        (Arch::Gfx942, 64, Dtype::Fp8, Dtype::Fp8) => CostTable::GFX942_FP8_HEADS_64,
        (Arch::Gfx942, 128, Dtype::Fp8, Dtype::Fp8) => CostTable::GFX942_FP8_HEADS_128,
        (Arch::Gfx950, 64, Dtype::Bf16, Dtype::Bf16) => CostTable::GFX950_BF16_HEADS_64,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merge_is_the_stated_share_of_a_block() {
        // 4 KiB against the bytes of a block: 18,432 of bf16 or 9,216 of fp8 at 16 tokens.
        assert_eq!(CostTable::BF16_HEADS_16.merge, 692);
        assert_eq!(CostTable::BF16_FP8_HEADS_16.merge, 1473);
        assert_eq!(CostTable::GFX942_FP8_HEADS_16.merge, 381);
        assert_eq!(CostTable::GFX942_FP8_HEADS_64.merge, 1436);
        assert_eq!(CostTable::GFX950_BF16_HEADS_64.merge, 406);
    }

    #[test]
    fn every_counted_kernel_is_found_and_serves_a_policy() {
        use Arch::{Gfx942, Gfx950};
        use Dtype::{Bf16, Fp8, Fp16};
        let found = [
            (Gfx942, 16, Bf16, Bf16),
            (Gfx950, 16, Bf16, Bf16),
            (Gfx942, 16, Bf16, Fp8),
            (Gfx942, 16, Fp8, Fp8),
            (Gfx942, 64, Fp8, Fp8),
            (Gfx942, 128, Fp8, Fp8),
            (Gfx950, 64, Bf16, Bf16),
        ];
        for (arch, heads, q, kv) in found {
            let table = cost_table(arch, heads, q, kv).unwrap();
            assert_eq!(table.validate(), Ok(()), "{arch} {heads} {q} {kv}");
        }
        for (arch, heads, q, kv) in [
            (Gfx950, 16, Bf16, Fp8),
            (Gfx950, 128, Fp8, Fp8),
            (Gfx942, 64, Bf16, Bf16),
            (Gfx942, 16, Fp16, Fp16),
            (Gfx942, 0, Bf16, Bf16),
        ] {
            assert_eq!(cost_table(arch, heads, q, kv), None);
        }
        assert_eq!(CostTable::AITER.validate(), Ok(()));
    }

    #[test]
    fn tables_that_no_policy_can_follow_are_refused() {
        let refused = |change: fn(&mut CostTable)| {
            let mut table = CostTable::AITER;
            change(&mut table);
            table.validate().unwrap_err().to_string()
        };
        assert_eq!(
            refused(|t| t.block_tokens = 0),
            "block_tokens is 0, must be at least 1"
        );
        assert!(refused(|t| t.block_tokens = 1 << 31).starts_with("block_tokens is 2147483648"));
        assert_eq!(refused(|t| t.block = 0), "block is 0, must be at least 1");
        assert_eq!(refused(|t| t.piece = 18), "piece is 18, must be at most 17");
        assert!(refused(|t| t.whole = MAX_COST + 1).starts_with("whole is 16777217"));
        assert!(refused(|t| t.merge = u32::MAX).starts_with("merge is"));
        assert!(refused(|t| t.cut = MAX_COST + 1).starts_with("cut is 16777217"));
        assert!(refused(|t| t.slot = u32::MAX).starts_with("slot is"));
        assert!(refused(|t| t.block = u32::MAX).starts_with("block is"));
    }
}
