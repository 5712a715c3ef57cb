//! A validated batch: what the host knows of one step, and how far it can trust each part.

use crate::rows::as_count;
use crate::{Expected, PlanError, Rule};

/// What the host knows of the KV lengths of a batch, one entry per request, this step's tokens included.
#[derive(Debug, Clone, Copy)]
pub enum Lengths<'a> {
    /// The lengths themselves.
    Exact(&'a [i32]),
    /// Lengths that may be too large: the true one lies in `bound - max_rejects ..= bound`.
    ///
    /// Under speculative decoding the host counts drafts as accepted before it hears which were.
    UpperBound {
        /// Largest possible length of each request.
        bound: &'a [i32],
        /// How many tokens of a bound may turn out rejected, for every request.
        max_rejects: i32,
    },
    /// Nothing: they exist on the device only.
    Unknown,
}

/// One step's batch as the host sees it. Every rule is checked when it is made; later code takes it as true.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    query_start_loc: &'a [i32],
    lengths: Lengths<'a>,
    boundaries_exact: bool,
    padded_rows: usize,
}

impl<'a> Batch<'a> {
    /// Checks and wraps the arrays of one step.
    ///
    /// `query_start_loc` has one entry more than there are requests; entry `r` is where the query tokens of request
    /// `r` start in the packed batch, the last entry is the number of rows. `padded_rows` is the number of rows that
    /// the consumer sees, for instance the size of a captured graph; `None` means no padding. With `boundaries_exact`
    /// false only the total of `query_start_loc` is true: the device has moved the boundaries between requests.
    ///
    /// # Errors
    ///
    /// [`PlanError`] naming the argument, the position and the value if a boundary falls, a length is missing,
    /// negative or smaller than the request's query tokens, or `padded_rows` is too small.
    pub fn new(
        query_start_loc: &'a [i32],
        lengths: Lengths<'a>,
        boundaries_exact: bool,
        padded_rows: Option<i64>,
    ) -> Result<Self, PlanError> {
        let named = match lengths {
            Lengths::Exact(seq_lens) => Some(("seq_lens", seq_lens)),
            Lengths::UpperBound { bound, .. } => Some(("seq_lens_bound", bound)),
            Lengths::Unknown => None,
        };
        let num_rows = match named {
            Some((_, lengths)) if boundaries_exact && is_valid(query_start_loc, lengths) => {
                query_start_loc.last().map_or(0, |&rows| as_count(rows))
            }
            _ => {
                let num_rows = check_boundaries(query_start_loc)?;
                if let Some((argument, lengths)) = named {
                    check_lengths(argument, lengths, query_start_loc, boundaries_exact)?;
                }
                num_rows
            }
        };
        if let Lengths::UpperBound { max_rejects, .. } = lengths
            && max_rejects < 0
        {
            return Err(PlanError::Number {
                argument: "max_rejects",
                value: max_rejects.into(),
                rule: Rule::AtLeast(0),
            });
        }
        let padded_rows = match padded_rows {
            None => num_rows,
            Some(padded) => usize::try_from(padded)
                .ok()
                .filter(|&padded| padded >= num_rows)
                .ok_or(PlanError::Number {
                    argument: "padded_rows",
                    value: padded,
                    rule: Rule::AtLeast(num_rows.try_into().unwrap_or(i64::MAX)),
                })?,
        };
        Ok(Self {
            query_start_loc,
            lengths,
            boundaries_exact,
            padded_rows,
        })
    }

    /// Where each request's query tokens start, and the number of rows last.
    pub fn query_start_loc(&self) -> &'a [i32] {
        self.query_start_loc
    }

    /// What is known of the KV lengths.
    pub fn lengths(&self) -> Lengths<'a> {
        self.lengths
    }

    /// Whether the boundaries between requests are the device's.
    pub fn boundaries_exact(&self) -> bool {
        self.boundaries_exact
    }

    /// Requests, those without query tokens included.
    pub fn num_requests(&self) -> usize {
        self.query_start_loc.len() - 1
    }

    /// Rows that belong to a request.
    pub fn num_rows(&self) -> usize {
        self.query_start_loc.last().map_or(0, |&rows| as_count(rows))
    }

    /// Rows that the consumer sees.
    pub fn padded_rows(&self) -> usize {
        self.padded_rows
    }
}

/// Whether boundaries start at 0 and never fall, and there is one length per request, not less than its query tokens.
///
/// One pass without a branch per request, four at a time; the checks that name the culprit are only paid for by a
/// wrong batch.
fn is_valid(query_start_loc: &[i32], lengths: &[i32]) -> bool {
    let [first, ends @ ..] = query_start_loc else {
        return false;
    };
    let wrong = query_start_loc
        .iter()
        .zip(ends)
        .zip(lengths)
        .fold(0, |wrong, ((&start, &end), &length)| {
            wrong | i32::from(end < start) | i32::from(length < end.wrapping_sub(start))
        });
    *first == 0 && ends.len() == lengths.len() && wrong == 0
}

/// Checks that boundaries start at 0 and never fall; returns the number of rows.
///
/// # Errors
///
/// [`PlanError`] naming the first boundary that breaks the rule.
pub fn check_boundaries(query_start_loc: &[i32]) -> Result<usize, PlanError> {
    let (Some(&first), Some(&last)) = (query_start_loc.first(), query_start_loc.last()) else {
        return Err(PlanError::Length {
            argument: "query_start_loc",
            actual: 0,
            expected: Expected::AtLeast(1),
        });
    };
    if first != 0 {
        return Err(PlanError::Entry {
            argument: "query_start_loc",
            index: 0,
            value: first.into(),
            rule: Rule::Equal(0),
        });
    }
    let falls = query_start_loc
        .windows(2)
        .map(|pair| pair[1] < pair[0])
        .fold(false, |any, one| any | one);
    if falls {
        let index = query_start_loc
            .windows(2)
            .position(|pair| pair[1] < pair[0])
            .unwrap_or(0)
            + 1;
        return Err(PlanError::Entry {
            argument: "query_start_loc",
            index,
            value: query_start_loc[index].into(),
            rule: Rule::NotBelowPrevious(query_start_loc[index - 1].into()),
        });
    }
    // First is 0 and nothing falls, so the last entry is not negative.
    Ok(as_count(last))
}

fn check_lengths(
    argument: &'static str,
    lengths: &[i32],
    query_start_loc: &[i32],
    boundaries_exact: bool,
) -> Result<(), PlanError> {
    let num_requests = query_start_loc.len() - 1;
    if lengths.len() != num_requests {
        return Err(PlanError::Length {
            argument,
            actual: lengths.len(),
            expected: Expected::Exactly(num_requests),
        });
    }
    // A request's query tokens are the host's guess when the boundaries are, so only the sign can be checked then.
    let floor = |pair: &[i32]| if boundaries_exact { pair[1] - pair[0] } else { 0 };
    let broken = |(&length, pair): (&i32, &[i32])| length < floor(pair);
    let any = lengths
        .iter()
        .zip(query_start_loc.windows(2))
        .map(broken)
        .fold(false, |any, one| any | one);
    if !any {
        return Ok(());
    }
    let index = lengths
        .iter()
        .zip(query_start_loc.windows(2))
        .position(broken)
        .unwrap_or(0);
    let value = lengths[index];
    let rule = if value < 0 {
        Rule::AtLeast(0)
    } else {
        Rule::NotBelowQueryLength((query_start_loc[index + 1] - query_start_loc[index]).into())
    };
    Err(PlanError::Entry {
        argument,
        index,
        value: value.into(),
        rule,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn falling_boundary_is_named() {
        let error = Batch::new(&[0, 3, 2], Lengths::Unknown, true, None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "query_start_loc[2] is 2, must not be less than the entry before it, 3"
        );
    }

    #[test]
    fn first_boundary_must_be_zero() {
        let error = Batch::new(&[1, 3], Lengths::Unknown, true, None).unwrap_err();
        assert_eq!(error.to_string(), "query_start_loc[0] is 1, must be 0");
    }

    #[test]
    fn length_below_query_tokens_is_named() {
        let error = Batch::new(&[0, 1, 4], Lengths::Exact(&[1, 2]), true, None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "seq_lens[1] is 2, must not be less than the request's 3 query tokens, which it includes"
        );
    }

    #[test]
    fn negative_length_of_an_idle_request_is_named() {
        let error = Batch::new(&[0, 0], Lengths::Exact(&[-1]), true, None).unwrap_err();
        assert_eq!(error.to_string(), "seq_lens[0] is -1, must be at least 0");
    }

    #[test]
    fn guessed_boundaries_leave_lengths_unchecked_against_them() {
        assert!(Batch::new(&[0, 4, 4], Lengths::Exact(&[3, 3]), false, None).is_ok());
    }

    #[test]
    fn empty_and_dummy_batches_are_valid() {
        assert_eq!(
            Batch::new(&[0], Lengths::Exact(&[]), true, None)
                .unwrap()
                .num_rows(),
            0
        );
        assert_eq!(
            Batch::new(&[0, 0], Lengths::Exact(&[0]), true, Some(4))
                .unwrap()
                .padded_rows(),
            4
        );
        assert_eq!(
            Batch::new(&[0, 1], Lengths::Exact(&[1]), true, None)
                .unwrap()
                .num_rows(),
            1
        );
    }

    #[test]
    fn extremes_do_not_overflow() {
        let top = i32::MAX;
        assert!(Batch::new(&[0, top], Lengths::Exact(&[top]), true, None).is_ok());
        assert!(Batch::new(&[0, i32::MIN], Lengths::Exact(&[top]), true, None).is_err());
        assert!(Batch::new(&[0, top, i32::MIN], Lengths::Unknown, true, None).is_err());
        assert!(Batch::new(&[0, 1], Lengths::Unknown, true, Some(i64::MIN)).is_err());
    }
}
