//! Policies and cost tables, good and bad.

use mlaplan::schedule::cost::MAX_COST;
use mlaplan::schedule::{CostTable, Policy};

use super::input::Input;

/// The policy by a few bits; more is read for others than aiter's only, so that older seeds say what they said.
pub(crate) fn policy(input: &mut Input<'_>, bits: u8) -> Policy {
    match bits % 8 {
        4 | 5 => Policy::Balanced(table(input)),
        6 | 7 => Policy::Invariant {
            table: table(input),
            piece_tokens: match input.byte() {
                few @ 0..=199 => i32::from(few) * 16,
                _ => input.number(),
            },
        },
        _ => Policy::Aiter,
    }
}

/// A kernel's table, or one of any numbers, which a policy may refuse.
fn table(input: &mut Input<'_>) -> CostTable {
    let kinds = input.byte();
    if kinds < 100 {
        return [
            CostTable::AITER,
            CostTable::BF16_HEADS_16,
            CostTable::GFX942_FP8_HEADS_16,
            CostTable::GFX950_BF16_HEADS_64,
        ][usize::from(kinds % 4)];
    }
    let mut cost = |least: u32| match input.byte() {
        small @ 0..=99 => u32::from(small).max(least),
        like_a_kernel @ 100..=219 => u32::from(like_a_kernel) * 150,
        huge @ 220..=239 => MAX_COST - u32::from(huge - 220),
        _ => input.any_u32(),
    };
    let [block_tokens, block] = [cost(1), cost(1)];
    let [piece, whole, slot, merge] = [cost(0), cost(0), cost(0), cost(0)];
    // Read for half of the tables, so that seeds from before there was such a cost say what they said.
    let cut = if kinds % 2 == 1 { cost(0) } else { 0 };
    CostTable {
        block_tokens,
        block,
        // Most of the time one that is allowed.
        piece: if kinds < 250 {
            piece.min(whole.saturating_add(block))
        } else {
            piece
        },
        whole,
        slot,
        merge,
        cut,
    }
}

/// The first number of a policy that breaks a rule.
pub(crate) fn fault(policy: &Policy) -> Option<&'static str> {
    let table = match policy {
        Policy::Aiter => return None,
        Policy::Invariant { piece_tokens, .. } if *piece_tokens < 1 => return Some("piece_tokens"),
        Policy::Balanced(table) | Policy::Invariant { table, .. } => table,
    };
    if table.block_tokens == 0 || i32::try_from(table.block_tokens).is_err() {
        Some("block_tokens")
    } else if !(1..=MAX_COST).contains(&table.block) {
        Some("block")
    } else if table.whole > MAX_COST {
        Some("whole")
    } else if table.slot > MAX_COST {
        Some("slot")
    } else if table.merge > MAX_COST {
        Some("merge")
    } else if table.cut > MAX_COST {
        Some("cut")
    } else if table.piece > MAX_COST || table.piece > table.whole + table.block {
        Some("piece")
    } else {
        None
    }
}
