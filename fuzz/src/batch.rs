//! Batches and rows: any arrays, against the rules of `docs/design.md` written out entry by entry.

use mlaplan::PlanError;
use mlaplan::batch::{Batch, Lengths};
use mlaplan::rows::{MAX_ROWS, kv_indptr, request_ids, row_lengths, segment_lengths};

use super::input::Input;

/// Rows up to which results are made; what is refused is refused for any number.
const MOST_ROWS: i64 = 1 << 12;

/// An argument, and the entry where an array is at fault there.
type Fault = (&'static str, Option<usize>);

#[derive(Debug)]
struct Case {
    query_start_loc: Vec<i32>,
    lengths: Vec<i32>,
    /// 0 for exact lengths, 1 for bounds, 2 for none.
    kind: u8,
    max_rejects: i32,
    boundaries_exact: bool,
    padded: Option<i64>,
    topk: i32,
}

/// Runs one input.
///
/// # Panics
///
/// If a result differs from the definition.
pub fn run(data: &[u8]) {
    let case = decode(&mut Input::new(data));
    check_batch(&case);
    check_rows(&case);
    check_row_lengths(&case);
    check_kv_indptr(&case.lengths);
    check_kv_indptr(&case.query_start_loc);
}

fn decode(input: &mut Input<'_>) -> Case {
    let orderly = !input.one_in(4);
    let entries = input.below(24);
    let mut query_start_loc = Vec::new();
    let mut end = if orderly { 0 } else { input.number() };
    for _ in 0..entries {
        query_start_loc.push(end);
        end = if orderly {
            end.saturating_add(input.number().max(0))
        } else {
            input.number()
        };
    }
    let kind = input.byte() % 3;
    let mut requests = entries.saturating_sub(1);
    if input.byte() > 230 {
        requests = input.below(24);
    }
    let lengths = (0..requests)
        .map(|request| {
            let query_len = match query_start_loc.get(request..request + 2) {
                Some(pair) if orderly => pair[1].wrapping_sub(pair[0]),
                _ => 0,
            };
            query_len.saturating_add(input.number())
        })
        .collect();
    let max_rejects = input.number();
    let boundaries_exact = !input.one_in(4);
    let rows = query_start_loc.last().map_or(0, |&rows| i64::from(rows));
    let padded = match input.byte() % 4 {
        0 => None,
        1 => Some(rows + i64::from(input.byte())),
        2 => Some(rows - i64::from(input.byte())),
        _ => Some(input.any_i64()),
    };
    let topk = input.number();
    Case {
        query_start_loc,
        lengths,
        kind,
        max_rejects,
        boundaries_exact,
        padded,
        topk,
    }
}

/// The first boundary that breaks a rule: they start at 0 and never fall.
fn boundary_fault(query_start_loc: &[i32]) -> Option<Fault> {
    let name = "query_start_loc";
    if query_start_loc.is_empty() {
        return Some((name, None));
    }
    if query_start_loc[0] != 0 {
        return Some((name, Some(0)));
    }
    let falls = |&at: &usize| query_start_loc[at] < query_start_loc[at - 1];
    (1..query_start_loc.len()).find(falls).map(|at| (name, Some(at)))
}

/// The first length that breaks a rule: one per request, none negative, none below the request's query tokens.
fn length_fault(name: &'static str, case: &Case, boundaries_exact: bool) -> Option<Fault> {
    let starts = &case.query_start_loc;
    if case.lengths.len() + 1 != starts.len() {
        return Some((name, None));
    }
    for (request, &length) in case.lengths.iter().enumerate() {
        let query_len = i64::from(starts[request + 1]) - i64::from(starts[request]);
        if length < 0 || (boundaries_exact && i64::from(length) < query_len) {
            return Some((name, Some(request)));
        }
    }
    None
}

fn batch_fault(case: &Case) -> Option<Fault> {
    if let Some(fault) = boundary_fault(&case.query_start_loc) {
        return Some(fault);
    }
    let exact = case.boundaries_exact;
    let lengths = match case.kind {
        0 => length_fault("seq_lens", case, exact),
        1 => length_fault("seq_lens_bound", case, exact)
            .or((case.max_rejects < 0).then_some(("max_rejects", None))),
        _ => None,
    };
    let too_few = case.padded.is_some_and(|padded| padded < live_rows(case));
    lengths.or(too_few.then_some(("padded_rows", None)))
}

fn live_rows(case: &Case) -> i64 {
    case.query_start_loc.last().map_or(0, |&rows| i64::from(rows))
}

fn fault_of(error: &PlanError) -> Fault {
    let text = error.to_string();
    match *error {
        PlanError::Entry { argument, index, .. } => {
            assert!(text.starts_with(&format!("{argument}[{index}] is ")), "{text}");
            (argument, Some(index))
        }
        PlanError::Length { argument, .. } | PlanError::Number { argument, .. } => {
            assert!(text.starts_with(argument), "{text}");
            (argument, None)
        }
        PlanError::Capacity {
            what,
            needed,
            available,
        } => {
            assert!(needed > available, "{text}");
            (what, None)
        }
        _ => panic!("unexpected {text}"),
    }
}

fn check_batch(case: &Case) {
    let lengths = match case.kind {
        0 => Lengths::Exact(&case.lengths),
        1 => Lengths::UpperBound {
            bound: &case.lengths,
            max_rejects: case.max_rejects,
        },
        _ => Lengths::Unknown,
    };
    let made = Batch::new(&case.query_start_loc, lengths, case.boundaries_exact, case.padded);
    assert_eq!(made.as_ref().err().map(fault_of), batch_fault(case), "{case:?}");
    let Ok(batch) = made else { return };
    assert_eq!(batch.query_start_loc(), case.query_start_loc);
    assert_eq!(batch.num_requests() + 1, case.query_start_loc.len());
    assert_eq!(i64::try_from(batch.num_rows()).unwrap(), live_rows(case));
    assert_eq!(
        i64::try_from(batch.padded_rows()).unwrap(),
        case.padded.unwrap_or(live_rows(case))
    );
}

/// What is wrong with the number of rows: fewer than live ones, or more than anybody has.
fn row_fault(case: &Case, padded: Option<usize>) -> Option<Fault> {
    let rows = padded.map_or(i128::from(live_rows(case)), |padded| padded as i128);
    if rows < i128::from(live_rows(case)) {
        return Some(("padded_rows", None));
    }
    (rows > MAX_ROWS as i128).then_some(("rows", None))
}

/// Number of rows asked for, as these functions take it.
fn padded_rows(case: &Case) -> Option<usize> {
    case.padded.and_then(|padded| usize::try_from(padded).ok())
}

/// Whether these functions can be asked: not for a negative number of rows, nor for a result that is large.
fn can_ask(case: &Case) -> bool {
    let rows = case.padded.unwrap_or(live_rows(case));
    (case.padded.is_none() || rows >= 0) && (rows <= MOST_ROWS || rows > i64::try_from(MAX_ROWS).unwrap())
}

fn check_rows(case: &Case) {
    let starts = &case.query_start_loc;
    let segments = segment_lengths(starts);
    assert_eq!(segments.as_ref().err().map(fault_of), boundary_fault(starts));
    if let Ok(segments) = segments {
        assert_eq!(segments.len() + 1, starts.len());
        for (request, query_len) in segments.into_iter().enumerate() {
            assert_eq!(query_len, starts[request + 1] - starts[request]);
        }
    }
    if !can_ask(case) {
        return;
    }
    let padded = padded_rows(case);
    let made = request_ids(starts, padded);
    let fault = boundary_fault(starts).or_else(|| row_fault(case, padded));
    assert_eq!(made.as_ref().err().map(fault_of), fault, "{case:?}");
    let Ok(ids) = made else { return };
    for (row, id) in (0..).zip(&ids) {
        let owner = (1..starts.len()).find(|&request| row < starts[request]);
        assert_eq!(
            usize::try_from(*id).unwrap(),
            owner.map_or(0, |request| request - 1)
        );
    }
    let rows = case.padded.unwrap_or(live_rows(case));
    assert_eq!(i64::try_from(ids.len()).unwrap(), rows);
}

fn check_row_lengths(case: &Case) {
    if !can_ask(case) {
        return;
    }
    let padded = padded_rows(case);
    let starts = &case.query_start_loc;
    let made = row_lengths(starts, &case.lengths, case.topk, padded);
    let rows = case.padded.unwrap_or(live_rows(case));
    let fault = boundary_fault(starts)
        .or_else(|| length_fault("seq_lens", case, true))
        .or((case.topk < 1).then_some(("topk", None)))
        .or_else(|| row_fault(case, padded))
        .or_else(|| {
            (rows * i64::from(case.topk) > i64::from(i32::MAX)).then_some(("rows x topk, in tokens", None))
        });
    assert_eq!(made.as_ref().err().map(fault_of), fault, "{case:?}");
    let Ok(lengths) = made else { return };
    let mut expected = Vec::new();
    for (request, &seq_len) in case.lengths.iter().enumerate() {
        let query_len = i64::from(starts[request + 1]) - i64::from(starts[request]);
        let context = i64::from(seq_len) - query_len;
        expected.extend((0..query_len).map(|i| (context + i + 1).clamp(0, i64::from(case.topk))));
    }
    expected.resize(usize::try_from(rows).unwrap(), 0);
    assert!(
        lengths.iter().map(|&length| i64::from(length)).eq(expected),
        "{case:?}"
    );
}

fn check_kv_indptr(row_lengths: &[i32]) {
    let mut sums = vec![0_i64];
    let mut fault = None;
    for (row, &length) in row_lengths.iter().enumerate() {
        let sum = sums[row] + i64::from(length);
        if length < 0 {
            fault = Some(("row_lengths", Some(row)));
        } else if sum > i64::from(i32::MAX) {
            fault = Some(("tokens in kv_indptr", None));
        }
        if fault.is_some() {
            break;
        }
        sums.push(sum);
    }
    let made = kv_indptr(row_lengths);
    assert_eq!(made.as_ref().err().map(fault_of), fault);
    if let Ok(made) = made {
        assert!(made.iter().map(|&sum| i64::from(sum)).eq(sums));
    }
}
