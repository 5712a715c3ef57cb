//! Per-token rows: one query token is one row of the sparse kernel.

use crate::batch::{Batch, Lengths, check_boundaries};
use crate::{PlanError, Rule};

/// Most rows that one batch may have: far above any scheduler's, and low enough that a wrong boundary cannot ask for
/// gigabytes.
pub const MAX_ROWS: usize = 1 << 24;

/// Query tokens of each request, one entry per request.
///
/// # Errors
///
/// [`PlanError`] if the boundaries do not start at 0 or fall.
pub fn segment_lengths(query_start_loc: &[i32]) -> Result<Vec<i32>, PlanError> {
    check_boundaries(query_start_loc)?;
    Ok(query_start_loc.windows(2).map(|pair| pair[1] - pair[0]).collect())
}

/// Request of each row; rows behind the last request get 0.
///
/// The result has `padded_rows` entries, or one per live row for `None`.
///
/// # Errors
///
/// [`PlanError`] if the boundaries do not start at 0 or fall, `padded_rows` is less than the live rows, or the rows
/// are more than [`MAX_ROWS`].
pub fn request_ids(query_start_loc: &[i32], padded_rows: Option<usize>) -> Result<Vec<i32>, PlanError> {
    let mut ids = vec![0; padded(check_boundaries(query_start_loc)?, padded_rows)?];
    fill_request_ids(query_start_loc, &mut ids);
    Ok(ids)
}

/// KV tokens that each row attends to: `min(context + i + 1, topk)` for the i-th query token of a request, 0 for
/// padding.
///
/// # Errors
///
/// [`PlanError`] if the boundaries are wrong, there is not one length per request, a length is less than the request's
/// query tokens, `topk` is not positive, `padded_rows` is less than the live rows, or rows x topk passes 2^31 - 1, the
/// index type of the kernels.
pub fn row_lengths(
    query_start_loc: &[i32],
    seq_lens: &[i32],
    topk: i32,
    padded_rows: Option<usize>,
) -> Result<Vec<i32>, PlanError> {
    let batch = Batch::new(query_start_loc, Lengths::Exact(seq_lens), true, None)?;
    check_topk(topk)?;
    let num_rows = padded(batch.num_rows(), padded_rows)?;
    check_tokens(num_rows, topk)?;
    let mut lengths = vec![0; num_rows];
    let mut rest = lengths.as_mut_slice();
    let seq_lens = seq_lens.chunks(CHUNK);
    for ((mut start, ends), seq_lens) in chunks(query_start_loc).zip(seq_lens) {
        let own;
        (own, rest) = rest.split_at_mut(rows_between(start, ends));
        if one_row_each(start, ends) {
            for (length, seq_len) in own.iter_mut().zip(seq_lens) {
                *length = topk.min(*seq_len);
            }
        } else {
            let mut own = own;
            for (&end, &seq_len) in ends.iter().zip(seq_lens) {
                let query_len = end - start;
                let (request, behind) = own.split_at_mut(as_count(query_len));
                fill_ramp(request, (seq_len - query_len).min(topk - 1), topk);
                own = behind;
                start = end;
            }
        }
    }
    Ok(lengths)
}

/// Running sum of the row lengths, one entry more than there are rows, first 0.
///
/// # Errors
///
/// [`PlanError`] naming the row if a length is negative or the sum passes the 32-bit index type of the kernels.
pub fn kv_indptr(row_lengths: &[i32]) -> Result<Vec<i32>, PlanError> {
    // One pass without a branch per entry; the search for the culprit is only paid for by wrong lengths.
    let (signs, total) = row_lengths.iter().fold((0, 0_i64), |(signs, total), &length| {
        (signs | length, total + i64::from(length))
    });
    if signs < 0 || total > i32::MAX.into() {
        return Err(wrong_lengths(row_lengths));
    }
    let mut indptr = vec![0; row_lengths.len() + 1];
    fill_sums(row_lengths, |length| length, 0, &mut indptr[1..]);
    Ok(indptr)
}

/// Says which of these lengths is negative or makes the sum too large.
fn wrong_lengths(row_lengths: &[i32]) -> PlanError {
    let mut total = 0_i64;
    for (index, &length) in row_lengths.iter().enumerate() {
        if length < 0 {
            return PlanError::Entry {
                argument: "row_lengths",
                index,
                value: length.into(),
                rule: Rule::AtLeast(0),
            };
        }
        total += i64::from(length);
        if total > i32::MAX.into() {
            break;
        }
    }
    PlanError::Capacity {
        what: "tokens in kv_indptr",
        needed: total,
        available: i32::MAX.into(),
    }
}

/// Requests that are looked at together, so that loops over their rows are long enough for vector instructions.
pub(crate) const CHUNK: usize = 64;

/// Cuts boundaries into chunks of requests: where the first one starts, and where each ends.
pub(crate) fn chunks(query_start_loc: &[i32]) -> impl Iterator<Item = (i32, &[i32])> {
    let (starts, ends) = match query_start_loc {
        [] => (query_start_loc, query_start_loc),
        [_, ends @ ..] => (query_start_loc, ends),
    };
    starts.iter().copied().step_by(CHUNK).zip(ends.chunks(CHUNK))
}

/// Rows of a chunk of requests.
pub(crate) fn rows_between(start: i32, ends: &[i32]) -> usize {
    ends.last().map_or(0, |&end| as_count(end - start))
}

/// Whether each request of a chunk has one row, as in a decode batch without drafts.
pub(crate) fn one_row_each(start: i32, ends: &[i32]) -> bool {
    let first = start.wrapping_add(1);
    (0..).zip(ends).fold(0, |differences, (index, &end)| {
        differences | (end ^ first.wrapping_add(index))
    }) == 0
}

/// A number of rows that was found not to be negative.
pub(crate) fn as_count(rows: i32) -> usize {
    usize::try_from(rows).unwrap_or(0)
}

/// Writes the running sum of `length(entry)` behind `total` and returns the last one.
///
/// Four entries at a time shorten the chain of additions; in a register the same takes as many instructions.
pub(crate) fn fill_sums(
    entries: &[i32],
    length: impl Fn(i32) -> i32,
    mut total: i32,
    out: &mut [i32],
) -> i32 {
    let (fours, rest) = entries.as_chunks::<4>();
    let (out_fours, out_rest) = out.as_chunks_mut::<4>();
    for (sums, entries) in out_fours.iter_mut().zip(fours) {
        let [a, b, c, d] = entries.map(&length);
        let (two, more) = (a + b, c + d);
        *sums = [total + a, total + two, total + two + c, total + two + more];
        total += two + more;
    }
    for (sum, &entry) in out_rest.iter_mut().zip(rest) {
        total += length(entry);
        *sum = total;
    }
    total
}

/// Writes `total + step`, `total + 2 step` and so on, and returns the last one.
pub(crate) fn fill_series(total: i32, step: i32, out: &mut [i32]) -> i32 {
    for (index, sum) in (1..).zip(&mut *out) {
        *sum = total + index * step;
    }
    out.last().copied().unwrap_or(total)
}

/// Writes the request of each row; `out` has at least one entry per live row, the rest becomes 0.
pub(crate) fn fill_request_ids(query_start_loc: &[i32], out: &mut [i32]) {
    let mut rest = out;
    for (first, (mut start, ends)) in (0_i32..).step_by(CHUNK).zip(chunks(query_start_loc)) {
        let own;
        (own, rest) = rest.split_at_mut(rows_between(start, ends));
        if one_row_each(start, ends) {
            for (id, entry) in (first..).zip(own) {
                *entry = id;
            }
        } else {
            let mut own = own;
            for (id, &end) in (first..).zip(ends) {
                let (request, behind) = own.split_at_mut(as_count(end - start));
                request.fill(id);
                own = behind;
                start = end;
            }
        }
    }
    rest.fill(0);
}

/// Writes the row lengths of one request: `min(context + i + 1, topk)`, `context` at most `topk - 1`.
fn fill_ramp(out: &mut [i32], context: i32, topk: i32) {
    let ramp = usize::try_from(topk - context).unwrap_or(0).min(out.len());
    let (growing, full) = out.split_at_mut(ramp);
    for (index, length) in (1..).zip(growing) {
        *length = context + index;
    }
    full.fill(topk);
}

/// Checks `topk`.
pub(crate) fn check_topk(topk: i32) -> Result<(), PlanError> {
    if topk < 1 {
        return Err(PlanError::Number {
            argument: "topk",
            value: topk.into(),
            rule: Rule::AtLeast(1),
        });
    }
    Ok(())
}

/// Checks that `rows` full rows can be addressed with the kernels' 32-bit token index.
pub(crate) fn check_tokens(rows: usize, topk: i32) -> Result<(), PlanError> {
    let tokens = i64::try_from(rows)
        .unwrap_or(i64::MAX)
        .saturating_mul(topk.into());
    if tokens > i32::MAX.into() {
        return Err(PlanError::Capacity {
            what: "rows x topk, in tokens",
            needed: tokens,
            available: i32::MAX.into(),
        });
    }
    Ok(())
}

fn padded(rows: usize, padded_rows: Option<usize>) -> Result<usize, PlanError> {
    let padded = padded_rows.unwrap_or(rows);
    let as_number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    if padded < rows {
        return Err(PlanError::Number {
            argument: "padded_rows",
            value: as_number(padded),
            rule: Rule::AtLeast(as_number(rows)),
        });
    }
    if padded > MAX_ROWS {
        return Err(PlanError::Capacity {
            what: "rows",
            needed: as_number(padded),
            available: as_number(MAX_ROWS),
        });
    }
    Ok(padded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_ramp_to_topk_and_stay() {
        assert_eq!(row_lengths(&[0, 4], &[4], 4, None), Ok(vec![1, 2, 3, 4]));
        assert_eq!(row_lengths(&[0, 4], &[8], 4, None), Ok(vec![4, 4, 4, 4]));
        assert_eq!(
            row_lengths(&[0, 2, 2, 5], &[3, 9, 4], 4, Some(7)),
            Ok(vec![2, 3, 2, 3, 4, 0, 0])
        );
    }

    #[test]
    fn the_longest_row_is_the_largest_number() {
        let top = i32::MAX;
        assert_eq!(row_lengths(&[0, 1], &[top], top, None), Ok(vec![top]));
        assert_eq!(row_lengths(&[0, 1], &[top - 1], top, None), Ok(vec![top - 1]));
    }

    #[test]
    fn request_ids_skip_idle_requests_and_pad_with_zero() {
        assert_eq!(request_ids(&[0, 1, 1, 3], Some(5)), Ok(vec![0, 2, 2, 0, 0]));
        assert_eq!(request_ids(&[0], None), Ok(vec![]));
    }

    #[test]
    fn too_few_padded_rows_are_refused() {
        assert_eq!(
            request_ids(&[0, 3], Some(2)).unwrap_err().to_string(),
            "padded_rows is 2, must be at least 3"
        );
    }

    #[test]
    fn rows_times_topk_must_fit_the_index_type() {
        assert!(row_lengths(&[0], &[], 2048, Some(1_048_575)).is_ok());
        assert_eq!(
            row_lengths(&[0], &[], 2048, Some(1_048_576))
                .unwrap_err()
                .to_string(),
            "rows x topk, in tokens: the batch needs 2147483648, there is room for 2147483647"
        );
        assert!(request_ids(&[0, i32::MAX], None).is_err());
    }

    #[test]
    fn kv_indptr_checks_the_index_type() {
        assert_eq!(kv_indptr(&[1, 2, 3]), Ok(vec![0, 1, 3, 6]));
        assert_eq!(kv_indptr(&[]), Ok(vec![0]));
        assert!(kv_indptr(&[i32::MAX, 1]).is_err());
        assert!(kv_indptr(&[i32::MAX]).is_ok());
        assert_eq!(
            kv_indptr(&[3, -1]).unwrap_err().to_string(),
            "row_lengths[1] is -1, must be at least 0"
        );
    }
}
