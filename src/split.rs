//! The split budget: how many slots a batch's rows may be spread over.

use crate::schedule::check_num_cus;
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
