//! What a plan depends on, per request, and the proof that a request is saturated.

use crate::batch::{Batch, Lengths};

/// The part of a batch that its rows depend on.
///
/// Holds the boundaries and each request's context clamped to `topk - 1`: with that context or a longer one the first row
/// of the request already has length `topk`, and so have all later ones. Equal fingerprints therefore mean equal
/// request ids and equal row lengths, whatever the lengths themselves were. Clamping the length alone would not do: a
/// first prefill chunk ramps and a later one is flat, both with a clamped length of `topk`.
#[derive(Debug, Clone, Default)]
pub struct Fingerprint {
    query_start_loc: Vec<i32>,
    contexts: Vec<i32>,
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
            contexts: Vec::with_capacity(max_requests),
        }
    }

    /// Takes the fingerprint of a batch; the content is meaningless unless the answer [is known](Knowledge::is_known).
    ///
    /// A request with a bound is known if `bound - max_rejects - query_len + 1 >= topk`: the shortest it can be, its
    /// first row is already full.
    pub fn take(&mut self, batch: &Batch<'_>, topk: i32) -> Knowledge {
        let boundaries = without_idle_tail(batch.query_start_loc());
        self.query_start_loc.clear();
        self.contexts.clear();
        self.query_start_loc.extend_from_slice(boundaries);
        let num_requests = boundaries.len() - 1;
        if num_requests == 0 {
            return Knowledge::Exact;
        }
        if !batch.boundaries_exact() {
            return Knowledge::BoundariesUnknown;
        }
        let full = topk - 1;
        let (lengths, max_rejects) = match batch.lengths() {
            Lengths::Exact(seq_lens) => (seq_lens, 0),
            Lengths::UpperBound { bound, max_rejects } => (bound, max_rejects),
            Lengths::Unknown => return Knowledge::LengthsUnknown,
        };
        // Idle requests have no rows: their context is set to one value, so that it makes no difference.
        let contexts = boundaries.windows(2).zip(lengths).map(|(pair, &length)| {
            let query_len = pair[1] - pair[0];
            if query_len == 0 {
                full
            } else {
                (length - query_len - max_rejects).min(full)
            }
        });
        self.contexts.extend(contexts);
        if max_rejects == 0 {
            return Knowledge::Exact;
        }
        if self.contexts.iter().all(|&context| context == full) {
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
        self.contexts == other.contexts
    }

    /// Length of the longest row, 0 without rows.
    pub fn longest_row(&self, topk: i32) -> i32 {
        self.segments()
            .map(|(query_len, context)| context.saturating_add(query_len).min(topk))
            .max()
            .unwrap_or(0)
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
        let mut total = 0_i32;
        for (query_len, context) in self.segments() {
            let (own, behind) = rest.split_at_mut(usize::try_from(query_len).unwrap_or(0));
            let mut length = context;
            for entry in own {
                length = (length + 1).min(topk);
                total += length;
                *entry = total;
            }
            rest = behind;
        }
        rest.fill(total);
    }

    /// Query tokens and clamped context of each request that has rows.
    fn segments(&self) -> impl Iterator<Item = (i32, i32)> + '_ {
        self.query_start_loc
            .windows(2)
            .zip(&self.contexts)
            .map(|(pair, &context)| (pair[1] - pair[0], context))
            .filter(|&(query_len, _)| query_len > 0)
    }
}

/// Leaves out requests without query tokens at the end: padding of a captured graph, which has no rows.
fn without_idle_tail(query_start_loc: &[i32]) -> &[i32] {
    let total = query_start_loc.last().copied().unwrap_or(0);
    let idle = query_start_loc
        .iter()
        .rev()
        .skip(1)
        .take_while(|&&start| start == total)
        .count();
    &query_start_loc[..query_start_loc.len() - idle]
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
