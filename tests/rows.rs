//! Rows and fingerprints against their definition, on batches long enough to be worked on in chunks.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use mlaplan::batch::{Batch, Lengths};
use mlaplan::fingerprint::{Fingerprint, Knowledge};
use mlaplan::rows::{kv_indptr, request_ids, row_lengths, segment_lengths};
use proptest::collection::vec;
use proptest::prelude::*;

/// Query tokens and context of each request.
type Requests = Vec<(i32, i32)>;

/// Stretches of requests of one kind, so that a chunk holds one kind or several: decodes, drafts, idle ones, ragged
/// ones, now and then a prompt. In some batches no context comes near the longest row.
fn requests() -> impl Strategy<Value = Requests> {
    let stretch = prop_oneof![
        3 => vec((Just(1), 0..3000_i32), 1..150),
        2 => vec((Just(1), 2047..9000_i32), 1..150),
        1 => vec((Just(4), 0..3000_i32), 1..80),
        1 => vec((0..4_i32, 0..3000_i32), 1..80),
        1 => vec((Just(0), 0..3000_i32), 1..80),
        1 => vec((1..4000_i32, 0..3000_i32), 1..3),
    ];
    let limit = prop_oneof![2 => Just(i32::MAX), 1 => Just(60), 1 => Just(1500)];
    (vec(stretch, 0..5), limit).prop_map(|(stretches, limit)| {
        let requests = stretches.concat().into_iter();
        requests
            .map(|(queries, context)| (queries, context % limit))
            .collect()
    })
}

fn boundaries(requests: &Requests) -> Vec<i32> {
    let ends = requests.iter().scan(0, |end, (queries, _)| {
        *end += queries;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

fn seq_lens(requests: &Requests) -> Vec<i32> {
    requests
        .iter()
        .map(|(queries, context)| queries + context)
        .collect()
}

/// Request and length of each row.
fn rows(requests: &Requests, topk: i32) -> Vec<(i32, i32)> {
    (0..)
        .zip(requests)
        .flat_map(|(id, &(queries, context))| {
            (1..=queries).map(move |token| (id, (context + token).min(topk)))
        })
        .collect()
}

fn sums(lengths: impl Iterator<Item = i32>) -> Vec<i32> {
    let mut sums = vec![0];
    for length in lengths {
        sums.push(sums.last().unwrap() + length);
    }
    sums
}

fn take(requests: &Requests, topk: i32) -> Fingerprint {
    let mut fingerprint = Fingerprint::default();
    let (boundaries, seq_lens) = (boundaries(requests), seq_lens(requests));
    let batch = Batch::new(&boundaries, Lengths::Exact(&seq_lens), true, None).unwrap();
    assert_eq!(fingerprint.take(&batch, topk), Knowledge::Exact);
    fingerprint
}

proptest! {
    #[test]
    fn every_row_is_as_defined(requests in requests(), topk in prop_oneof![Just(1), Just(100), Just(2048)], padding in 0..70_usize) {
        let rows = rows(&requests, topk);
        let boundaries = boundaries(&requests);
        let padded = rows.len() + padding;
        let mut ids: Vec<i32> = rows.iter().map(|row| row.0).collect();
        let mut lengths: Vec<i32> = rows.iter().map(|row| row.1).collect();
        prop_assert_eq!(take(&requests, topk).longest_row(topk), lengths.iter().copied().max().unwrap_or(0));
        ids.resize(padded, 0);
        lengths.resize(padded, 0);
        let indptr = sums(lengths.iter().copied());
        let queries: Vec<i32> = requests.iter().map(|request| request.0).collect();
        prop_assert_eq!(segment_lengths(&boundaries), Ok(queries));
        prop_assert_eq!(&request_ids(&boundaries, Some(padded)).unwrap(), &ids);
        prop_assert_eq!(&row_lengths(&boundaries, &seq_lens(&requests), topk, Some(padded)).unwrap(), &lengths);
        prop_assert_eq!(&kv_indptr(&lengths).unwrap(), &indptr);

        let mut written = (vec![-1; padded], vec![-1; padded + 1]);
        take(&requests, topk).write_rows(topk, &mut written.0, &mut written.1).unwrap();
        prop_assert_eq!(written, (ids, indptr));
    }

    #[test]
    fn equal_fingerprints_are_equal_rows(
        requests in requests(),
        others in vec((any::<prop::sample::Index>(), 0..4_i32, 0..5000_i32), 0..3),
        topk in prop_oneof![Just(1), Just(2048)],
    ) {
        let mut changed = requests.clone();
        for (index, queries, context) in others {
            if !changed.is_empty() {
                let index = index.index(changed.len());
                changed[index] = (queries, context);
            }
        }
        let (one, other) = (take(&requests, topk), take(&changed, topk));
        let same = one.same_boundaries(&other) && one.same_contexts(&other);
        // A request without rows moves the numbers of those behind it, but not those of none.
        let trim = |requests: &Requests| requests.iter().rposition(|request| request.0 > 0).map_or(0, |last| last + 1);
        let queries = |requests: &Requests| requests[..trim(requests)].iter().map(|request| request.0).collect::<Vec<_>>();
        let all_same = queries(&requests) == queries(&changed) && rows(&requests, topk) == rows(&changed, topk);
        prop_assert_eq!(same, all_same);
    }

    #[test]
    fn a_bound_is_saturated_when_its_shortest_request_is(
        requests in requests(),
        rejects in prop_oneof![Just(1), 1..40_i32, Just(i32::MAX)],
        topk in prop_oneof![Just(1), Just(100), Just(2048), Just(i32::MAX)],
    ) {
        let boundaries = boundaries(&requests);
        let bound = seq_lens(&requests);
        let lengths = Lengths::UpperBound { bound: &bound, max_rejects: rejects };
        let batch = Batch::new(&boundaries, lengths, true, None).unwrap();
        let proven = requests.iter().all(|&(queries, context)| {
            queries == 0 || i64::from(context) - i64::from(rejects) + 1 >= i64::from(topk)
        });
        let wanted = match (boundaries.last().unwrap(), proven) {
            (0, _) => Knowledge::Exact,
            (_, true) => Knowledge::Saturated,
            (_, false) => Knowledge::BoundNotSaturated,
        };
        prop_assert_eq!(Fingerprint::default().take(&batch, topk), wanted);
    }

    #[test]
    fn a_wrong_entry_anywhere_is_named(
        requests in requests(),
        index in any::<prop::sample::Index>(),
        by in prop_oneof![Just(1), 1..5000_i32, Just(i32::MAX)],
    ) {
        prop_assume!(!requests.is_empty());
        let index = index.index(requests.len());
        let (mut boundaries, mut lengths) = (boundaries(&requests), seq_lens(&requests));
        lengths[index] = requests[index].0 - by;
        let batch = |boundaries: &[i32], lengths: &[i32]| {
            Batch::new(boundaries, Lengths::Exact(lengths), true, None).map(|_| ()).map_err(|error| error.to_string())
        };
        let message = batch(&boundaries, &lengths).unwrap_err();
        prop_assert!(message.starts_with(&format!("seq_lens[{index}] is {}", lengths[index])), "{message}");
        lengths[index] = i32::MAX;
        boundaries[index + 1] = boundaries[index].wrapping_sub(by);
        let message = batch(&boundaries, &lengths).unwrap_err();
        prop_assert!(message.starts_with(&format!("query_start_loc[{}] is", index + 1)), "{message}");
    }
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let fingerprint = take(&vec![(2, 5), (1, 0)], 64);
    let message = |ids: usize, indptr: usize| {
        fingerprint
            .write_rows(64, &mut vec![0; ids], &mut vec![0; indptr])
            .unwrap_err()
            .to_string()
    };
    assert_eq!(message(2, 4), "request_ids has 2 entries, expected at least 3");
    assert_eq!(message(3, 3), "kv_indptr has 3 entries, expected at least 4");
}

#[test]
fn the_largest_batch_of_numbers_does_not_overflow() {
    let top = i32::MAX;
    let (boundaries, seq_lens) = ([0, 1], [top]);
    let batch = Batch::new(&boundaries, Lengths::Exact(&seq_lens), true, None).unwrap();
    let mut fingerprint = Fingerprint::default();
    assert_eq!(fingerprint.take(&batch, top), Knowledge::Exact);
    let (mut ids, mut indptr) = ([9; 3], [9; 4]);
    fingerprint.write_rows(top, &mut ids, &mut indptr).unwrap();
    assert_eq!((ids, indptr), ([0; 3], [0, top, top, top]));
    assert_eq!(fingerprint.longest_row(top), top);
}
