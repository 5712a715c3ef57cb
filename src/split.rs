//! The split budget: how many slots a batch's rows may be spread over.

use crate::schedule::{CostTable, check_num_cus};
use crate::{PlanError, Rule};

/// Returns the budget that gives each split about `min_tokens_per_split` tokens of work: a power of two, or `num_cus`
/// if that is less.
///
/// `min(next_power_of_two(max(1, min(max_seq_len, topk) / min_tokens_per_split)), num_cus)`, the division rounding down.
/// The result is what aiter calls `max_split_per_batch`. It is not a limit per row: a batch of `rows` rows may use
/// `min(num_cus, budget * rows)` slots.
///
/// # Errors
///
/// [`PlanError::Number`] if `max_seq_len` is negative, or if one of the others is below 1 or `num_cus` too large.
///
/// # Examples
///
/// ```
/// use mlaplan::split::max_split_per_batch;
///
/// assert_eq!(max_split_per_batch(100_000, 2048, 304, 128), Ok(16));
/// assert_eq!(max_split_per_batch(100, 2048, 304, 128), Ok(1));
/// ```
pub fn max_split_per_batch(
    max_seq_len: i64,
    topk: i32,
    num_cus: usize,
    min_tokens_per_split: i32,
) -> Result<i32, PlanError> {
    if max_seq_len < 0 {
        return Err(PlanError::Number {
            argument: "max_seq_len",
            value: max_seq_len,
            rule: Rule::AtLeast(0),
        });
    }
    check_positive("topk", topk)?;
    check_positive("min_tokens_per_split", min_tokens_per_split)?;
    let num_cus = check_num_cus(num_cus)?;
    let longest = max_seq_len.min(i64::from(topk));
    let splits = (longest / i64::from(min_tokens_per_split)).max(1);
    // At most 2^31 before the limit, for `longest` is an i32; at most `num_cus` behind it.
    let budget = splits
        .unsigned_abs()
        .next_power_of_two()
        .min(u64::from(num_cus.unsigned_abs()));
    Ok(i32::try_from(budget).unwrap_or(num_cus))
}

/// Returns the budget that makes the longest row's longest piece and its merge cheapest by `table`, in slots per row.
///
/// The smallest `k` in `1 ..= min(n, num_cus)` that minimises `whole + n * block` for `k = 1` and
/// `piece + ceil(n / k) * block + k * merge + cut` for others, with `n` the blocks of a row of `longest_row` tokens; 1 for no tokens.
///
/// # Errors
///
/// [`PlanError::Number`] if `longest_row` is negative or `num_cus` out of range, and as [`CostTable::validate`].
///
/// # Examples
///
/// ```
/// use mlaplan::schedule::CostTable;
/// use mlaplan::split::split_budget;
///
/// assert_eq!(split_budget(2048, &CostTable::BF16_HEADS_16, 304), Ok(26));
/// assert_eq!(split_budget(60, &CostTable::BF16_HEADS_16, 304), Ok(4));
/// assert_eq!(split_budget(16, &CostTable::BF16_HEADS_16, 304), Ok(1));
/// ```
pub fn split_budget(longest_row: i32, table: &CostTable, num_cus: usize) -> Result<i32, PlanError> {
    let Ok(tokens) = u32::try_from(longest_row) else {
        return Err(PlanError::Number {
            argument: "longest_row",
            value: longest_row.into(),
            rule: Rule::AtLeast(0),
        });
    };
    let num_cus = check_num_cus(num_cus)?;
    table.validate()?;
    Ok(best_pieces(table.blocks(tokens), table, num_cus))
}

/// The budget for a longest row of `blocks` blocks, the table and the number of units being valid.
///
/// Among numbers of pieces with the same longest piece the smallest is the cheapest, so what is tried is the longest piece, from that of as
/// many pieces as there may be upwards: until it alone costs more than the best so far, after about twice the square root of `blocks`.
fn best_pieces(blocks: u64, table: &CostTable, num_cus: i32) -> i32 {
    let [block, piece, whole] = [table.block, table.piece, table.whole].map(u64::from);
    let [merge, cut] = [table.merge, table.cut].map(u64::from);
    let most = blocks.min(num_cus.unsigned_abs().into());
    let uncut = whole + blocks * block;
    let mut best = (uncut, 1);
    let mut longest = if most < 2 { blocks } else { blocks.div_ceil(most) };
    while longest < blocks {
        let fixed = piece + longest * block + cut;
        if fixed + 2 * merge > best.0 {
            break;
        }
        let pieces = div_ceil(blocks, longest);
        let cost = fixed + pieces * merge;
        // Of several that are as good the fewest pieces, which come last, but for one.
        if cost < uncut && cost <= best.0 {
            best = (cost, pieces);
        }
        // Behind the square root several longest pieces go with as many pieces, the shortest of which is the cheapest.
        longest = if longest * longest < blocks {
            longest + 1
        } else {
            div_ceil(blocks, pieces - 1)
        };
    }
    i32::try_from(best.1).unwrap_or(num_cus)
}

/// `n / by`, rounded up, for numbers that nearly always fit 32 bits, which are divided in half the time.
fn div_ceil(n: u64, by: u64) -> u64 {
    match (u32::try_from(n), u32::try_from(by)) {
        (Ok(n), Ok(by)) => n.div_ceil(by).into(),
        _ => n.div_ceil(by),
    }
}

fn check_positive(argument: &'static str, value: i32) -> Result<(), PlanError> {
    if value < 1 {
        return Err(PlanError::Number {
            argument,
            value: value.into(),
            rule: Rule::AtLeast(1),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_follows_the_shorter_of_sequence_and_topk() {
        assert_eq!(max_split_per_batch(2048, 2048, 304, 128), Ok(16));
        assert_eq!(max_split_per_batch(i64::MAX, 2048, 304, 128), Ok(16));
        assert_eq!(max_split_per_batch(384, 2048, 304, 128), Ok(4));
        assert_eq!(max_split_per_batch(384, 256, 304, 128), Ok(2));
    }

    #[test]
    fn short_sequences_get_one_split() {
        for length in [0, 1, 127, 128, 255] {
            assert_eq!(
                max_split_per_batch(length, 2048, 304, 128),
                Ok(1),
                "length {length}"
            );
        }
        assert_eq!(max_split_per_batch(256, 2048, 304, 128), Ok(2));
    }

    #[test]
    fn budget_never_passes_the_compute_units() {
        assert_eq!(max_split_per_batch(2048, 2048, 12, 128), Ok(12));
        assert_eq!(max_split_per_batch(i64::MAX, i32::MAX, 304, 1), Ok(304));
        assert_eq!(max_split_per_batch(i64::MAX, i32::MAX, 1, 1), Ok(1));
    }

    #[test]
    fn cheapest_number_of_pieces_is_that_of_a_scan() {
        let tables = [
            [16, 3115, 11_330, 15_460, 692, 0],
            [16, 3115, 11_330, 15_460, 692, 40_000],
            [64, 3435, 8920, 10_040, 381, 9000],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 100],
            [1, 7, 7, 0, 3, 50],
            [3, 1, 16_777_216, 16_777_216, 16_777_216, 16_777_216],
            [16, 1, 16, 16, 1, 30],
            [16, 16_777_216, 0, 0, 1, 16_777_216],
        ];
        for [block_tokens, block, piece, whole, merge, cut] in tables {
            let table = CostTable {
                block_tokens,
                block,
                piece,
                whole,
                slot: 5,
                merge,
                cut,
            };
            for num_cus in [1, 2, 7, 304] {
                for length in (0..700).chain([2048, 4095, 4096]) {
                    let blocks = u64::from(u32::try_from(length).unwrap().div_ceil(block_tokens));
                    let cost = |pieces: u64| match pieces {
                        1 => u64::from(whole) + blocks * u64::from(block),
                        _ => {
                            u64::from(piece)
                                + blocks.div_ceil(pieces) * u64::from(block)
                                + pieces * u64::from(merge)
                                + u64::from(cut)
                        }
                    };
                    let most = blocks.min(num_cus as u64).max(1);
                    let best = (1..=most).min_by_key(|&pieces| (cost(pieces), pieces)).unwrap();
                    let found = split_budget(length, &table, num_cus).unwrap();
                    assert_eq!(
                        u64::from(found.unsigned_abs()),
                        best,
                        "{table:?} {num_cus} {length}"
                    );
                }
            }
        }
    }

    #[test]
    fn longest_rows_and_tables_have_a_budget() {
        let table = CostTable {
            block_tokens: 1,
            merge: 1,
            ..CostTable::AITER
        };
        // The square root of the blocks.
        assert_eq!(split_budget(1 << 30, &table, 1 << 16), Ok(1 << 15));
        assert!(split_budget(i32::MAX, &table, 1 << 16).is_ok());
        assert!(split_budget(-1, &table, 1).is_err());
        assert!(split_budget(1, &table, 0).is_err());
        assert!(split_budget(1, &CostTable { piece: 99, ..table }, 1).is_err());
    }

    #[test]
    fn bad_arguments_are_named() {
        let name = |result: Result<i32, PlanError>| match result {
            Err(PlanError::Number { argument, .. }) => argument,
            other => panic!("{other:?}"),
        };
        assert_eq!(name(max_split_per_batch(-1, 2048, 304, 128)), "max_seq_len");
        assert_eq!(name(max_split_per_batch(1, 0, 304, 128)), "topk");
        assert_eq!(name(max_split_per_batch(1, 2048, 0, 128)), "num_cus");
        assert_eq!(name(max_split_per_batch(1, 2048, usize::MAX, 128)), "num_cus");
        assert_eq!(name(max_split_per_batch(1, 2048, 304, 0)), "min_tokens_per_split");
        assert_eq!(
            name(max_split_per_batch(1, 2048, 304, i32::MIN)),
            "min_tokens_per_split"
        );
    }
}
