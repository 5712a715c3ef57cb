//! What a plan depends on, per request, and the proof that a request is saturated.

use crate::batch::{Batch, Lengths};
use crate::rows::{
    CHUNK, as_count, chunks, fill_request_ids, fill_series, fill_sums, one_row_each, rows_between,
};
use crate::{Expected, PlanError};

/// The part of a batch that its rows depend on.
///
/// Holds the boundaries and each request's context clamped to `topk - 1`: with that context or a longer one the first row
/// of the request already has length `topk`, and so have all later ones. Equal fingerprints therefore mean equal
/// request ids and equal row lengths, whatever the lengths themselves were. Clamping the length alone would not do: a
/// first prefill chunk ramps and a later one is flat, both with a clamped length of `topk`.
#[derive(Debug, Clone, Default)]
pub struct Fingerprint {
    query_start_loc: Vec<i32>,
    /// How far each clamped context lies below `topk - 1`: the rows of the request before the first full one, if it has
    /// that many. Counted from there because 0 then stands for both saturated and idle, and idle is a mask.
    missing: Vec<i32>,
}

/// How far the host knows a batch's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Knowledge {
    /// Every row follows from exact lengths.
    Exact,
    /// Every row follows from bounds, at least one because its bound proves saturation.
    Saturated,
    /// The boundaries between requests are the device's.
    BoundariesUnknown,
    /// The lengths are the device's.
    LengthsUnknown,
    /// A bound leaves room for a request that is not saturated.
    BoundNotSaturated,
}

/// Up to so many rows of a request, as drafts have, are written one by one: a loop of four at a time starts slowly.
const SHORT: usize = 8;

impl Knowledge {
    /// Whether the host can make the plan itself.
    pub fn is_known(self) -> bool {
        matches!(self, Self::Exact | Self::Saturated)
    }
}

impl Fingerprint {
    /// An empty fingerprint with room for `max_requests` requests, so that taking one never allocates.
    pub fn with_capacity(max_requests: usize) -> Self {
        Self {
            query_start_loc: Vec::with_capacity(max_requests + 1),
            missing: Vec::with_capacity(max_requests),
        }
    }

    /// Takes the fingerprint of a batch; the content is meaningless unless the answer [is known](Knowledge::is_known).
    ///
    /// A request with a bound is known if `bound - max_rejects - query_len + 1 >= topk`: the shortest it can be, its
    /// first row is already full.
    pub fn take(&mut self, batch: &Batch<'_>, topk: i32) -> Knowledge {
        let boundaries = without_idle_tail(batch.query_start_loc());
        self.query_start_loc.clear();
        self.missing.clear();
        self.query_start_loc.extend_from_slice(boundaries);
        let [_, ends @ ..] = boundaries else {
            return Knowledge::Exact;
        };
        if ends.is_empty() {
            return Knowledge::Exact;
        }
        if !batch.boundaries_exact() {
            return Knowledge::BoundariesUnknown;
        }
        let (lengths, max_rejects) = match batch.lengths() {
            Lengths::Exact(seq_lens) => (seq_lens, 0),
            Lengths::UpperBound { bound, max_rejects } => (bound, max_rejects),
            Lengths::Unknown => return Knowledge::LengthsUnknown,
        };
        let full = topk - 1;
        // No branch per request, and no instruction that SSE2 lacks: four requests at a time on any x86-64.
        let queries = boundaries.iter().zip(ends).map(|(start, end)| end - start);
        let requests = queries.zip(lengths);
        if max_rejects == 0 {
            let contexts = requests.map(|(query_len, length)| (query_len, length - query_len));
            self.missing
                .extend(contexts.map(|(query_len, context)| missing(full, query_len, context)));
            return Knowledge::Exact;
        }
        // A bound less its rejects may be below 0, by more than a difference can hold.
        let contexts =
            requests.map(|(query_len, length)| (query_len, (length - query_len - max_rejects).max(-1)));
        self.missing
            .extend(contexts.map(|(query_len, context)| missing(full, query_len, context)));
        if all_zero(&self.missing) {
            Knowledge::Saturated
        } else {
            Knowledge::BoundNotSaturated
        }
    }

    /// Rows that belong to a request.
    pub fn num_rows(&self) -> usize {
        self.query_start_loc
            .last()
            .map_or(0, |&rows| usize::try_from(rows).unwrap_or(0))
    }

    /// Boundaries of the requests, idle ones at the end left out.
    pub fn query_start_loc(&self) -> &[i32] {
        &self.query_start_loc
    }

    /// Whether the boundaries are equal.
    pub fn same_boundaries(&self, other: &Self) -> bool {
        self.query_start_loc == other.query_start_loc
    }

    /// Whether the clamped contexts are equal.
    pub fn same_contexts(&self, other: &Self) -> bool {
        self.missing == other.missing
    }

    /// Length of the longest row, 0 without rows.
    pub fn longest_row(&self, topk: i32) -> i32 {
        let [_, ends @ ..] = self.query_start_loc.as_slice() else {
            return 0;
        };
        // The last row of a request is its longest one.
        let shortfalls = self.query_start_loc.iter().zip(ends).zip(&self.missing);
        let least = shortfalls.fold(topk, |least, ((&start, &end), &missing)| {
            let query_len = end - start;
            let shortfall = (missing + 1 - query_len).max(0);
            least.min(if query_len == 0 { topk } else { shortfall })
        });
        topk - least
    }

    /// Writes `request_ids` and `kv_indptr`, each with its tail: 0 and the total.
    ///
    /// Rows x topk has to fit an `i32`, which is checked where a planner is made.
    ///
    /// # Errors
    ///
    /// [`PlanError::Length`] if `request_ids` has less than one entry per row, or `kv_indptr` none more than that.
    pub fn write_rows(
        &self,
        topk: i32,
        request_ids: &mut [i32],
        kv_indptr: &mut [i32],
    ) -> Result<(), PlanError> {
        let rows = self.num_rows();
        for (argument, actual, needed) in [
            ("request_ids", request_ids.len(), rows),
            ("kv_indptr", kv_indptr.len(), rows + 1),
        ] {
            if actual < needed {
                return Err(PlanError::Length {
                    argument,
                    actual,
                    expected: Expected::AtLeast(needed),
                });
            }
        }
        fill_request_ids(&self.query_start_loc, request_ids);
        self.fill_kv_indptr(topk, kv_indptr);
        Ok(())
    }

    /// Writes `kv_indptr`: entry `t + 1` is the sum of the first `t + 1` row lengths; the rest repeats the total.
    ///
    /// `out` has one entry more than there are rows, or more. Rows x topk fits an `i32` (checked where a planner is
    /// made).
    pub(crate) fn fill_kv_indptr(&self, topk: i32, out: &mut [i32]) {
        let Some((first, mut rest)) = out.split_first_mut() else {
            return;
        };
        *first = 0;
        let mut total = 0;
        let missing = self.missing.chunks(CHUNK);
        for ((mut start, ends), missing) in chunks(&self.query_start_loc).zip(missing) {
            let own;
            (own, rest) = rest.split_at_mut(rows_between(start, ends));
            if all_zero(missing) {
                total = fill_series(total, topk, own);
            } else if one_row_each(start, ends) {
                total = fill_sums(missing, |missing| topk - missing, total, own);
            } else {
                let mut own = own;
                for (&end, &missing) in ends.iter().zip(missing) {
                    let (request, behind) = own.split_at_mut(as_count(end - start));
                    total = fill_ramp_sums(missing, topk, total, request);
                    own = behind;
                    start = end;
                }
            }
        }
        rest.fill(total);
    }
}

/// How far a context lies below `full`; 0 for one at or above it, and for a request without rows.
fn missing(full: i32, query_len: i32, context: i32) -> i32 {
    // All ones where there are rows: what an idle request has in its cache makes no difference.
    let has_rows = -query_len >> 31;
    (full - context).max(0) & has_rows
}

/// Writes the running sum of one request's row lengths behind `total`: `missing` rows that grow, then full ones.
fn fill_ramp_sums(missing: i32, topk: i32, mut total: i32, out: &mut [i32]) -> i32 {
    let mut length = topk - missing;
    if out.len() <= SHORT {
        for sum in out {
            length = topk.min(length);
            total += length;
            length = length.wrapping_add(1);
            *sum = total;
        }
        return total;
    }
    let growing = as_count(missing).min(out.len());
    let (growing, full) = out.split_at_mut(growing);
    for sum in growing {
        total += length;
        length += 1;
        *sum = total;
    }
    fill_series(total, topk, full)
}

fn all_zero(entries: &[i32]) -> bool {
    entries.iter().fold(0, |any, &entry| any | entry) == 0
}

/// Leaves out requests without query tokens at the end: padding of a captured graph, which has no rows.
fn without_idle_tail(query_start_loc: &[i32]) -> &[i32] {
    match query_start_loc {
        [.., before, last] if before == last => {
            // Boundaries never fall, so the tail can be found by halving.
            let live = query_start_loc.partition_point(|start| start < last);
            &query_start_loc[..=live]
        }
        _ => query_start_loc,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(query_start_loc: &[i32], lengths: Lengths<'_>, topk: i32) -> (Fingerprint, Knowledge) {
        let mut fingerprint = Fingerprint::default();
        let batch = Batch::new(query_start_loc, lengths, true, None).unwrap();
        let knowledge = fingerprint.take(&batch, topk);
        (fingerprint, knowledge)
    }

    #[test]
    fn first_and_later_prefill_chunk_differ() {
        let (first, _) = take(&[0, 4], Lengths::Exact(&[4]), 4);
        let (later, _) = take(&[0, 4], Lengths::Exact(&[8]), 4);
        assert!(!first.same_contexts(&later));
        let mut out = [9; 6];
        first.fill_kv_indptr(4, &mut out);
        assert_eq!(out, [0, 1, 3, 6, 10, 10]);
        later.fill_kv_indptr(4, &mut out);
        assert_eq!(out, [0, 4, 8, 12, 16, 16]);
    }

    #[test]
    fn saturation_needs_room_for_every_reject() {
        let bound = |value| {
            take(
                &[0, 4],
                Lengths::UpperBound {
                    bound: &[value],
                    max_rejects: 3,
                },
                2048,
            )
            .1
        };
        assert_eq!(bound(2053), Knowledge::BoundNotSaturated);
        assert_eq!(bound(2054), Knowledge::Saturated);
    }

    #[test]
    fn a_proven_bound_and_the_exact_length_are_one_plan() {
        let (exact, _) = take(&[0, 2], Lengths::Exact(&[9000]), 2048);
        let (bound, _) = take(
            &[0, 2],
            Lengths::UpperBound {
                bound: &[9999],
                max_rejects: 5,
            },
            2048,
        );
        assert!(exact.same_contexts(&bound) && exact.same_boundaries(&bound));
    }

    #[test]
    fn idle_requests_make_no_difference() {
        let (padded, _) = take(&[0, 1, 2, 2, 2], Lengths::Exact(&[7, 8, 0, 50]), 64);
        let (bare, _) = take(&[0, 1, 2], Lengths::Exact(&[7, 8]), 64);
        assert!(padded.same_boundaries(&bare) && padded.same_contexts(&bare));
        let (middle, knowledge) = take(&[0, 1, 1, 2], Lengths::Exact(&[7, 3, 8]), 64);
        assert_eq!(knowledge, Knowledge::Exact);
        assert_eq!(middle.longest_row(64), 8);
        assert_eq!(take(&[0, 0, 0], Lengths::Unknown, 64).1, Knowledge::Exact);
    }

    #[test]
    fn extremes_do_not_overflow() {
        let top = i32::MAX;
        let lengths = Lengths::UpperBound {
            bound: &[top],
            max_rejects: top,
        };
        assert_eq!(take(&[0, top], lengths, top).1, Knowledge::BoundNotSaturated);
        let lengths = Lengths::UpperBound {
            bound: &[1],
            max_rejects: top,
        };
        assert_eq!(take(&[0, 1], lengths, 1).1, Knowledge::BoundNotSaturated);
    }
}
