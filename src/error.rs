//! The only error type of the core.

use std::fmt;

/// Why an input was refused. Nothing has changed when one of these is returned.
///
/// Fields instead of text: the message is built only when somebody asks for it. Every message starts with the
/// argument's name, then the position where there is one, then the value and the rule it breaks.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanError {
    /// An array has the wrong number of entries.
    Length {
        /// Argument at fault.
        argument: &'static str,
        /// Entries that it has.
        actual: usize,
        /// What it should have, in words such as "at least 1" or "4 (one per request)".
        expected: Expected,
    },
    /// An entry of an array breaks a rule.
    Entry {
        /// Argument at fault.
        argument: &'static str,
        /// Position of the entry.
        index: usize,
        /// Its value.
        value: i64,
        /// The rule, read after "must".
        rule: Rule,
    },
    /// A single number breaks a rule.
    Number {
        /// Argument at fault.
        argument: &'static str,
        /// Its value.
        value: i64,
        /// The rule, read after "must".
        rule: Rule,
    },
    /// A batch is larger than what the planner was made for, or than an index type holds.
    Capacity {
        /// What is counted, such as "rows" or "requests".
        what: &'static str,
        /// What the batch needs.
        needed: i64,
        /// What there is.
        available: i64,
    },
    /// A name is not one of those known.
    Name {
        /// Argument at fault.
        argument: &'static str,
        /// What was given.
        value: String,
        /// The names that are known.
        known: &'static str,
    },
    /// The call needs something else to have happened first.
    State {
        /// What is missing, a full sentence fragment.
        message: &'static str,
    },
}

/// How many entries an array should have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// Exactly this many.
    Exactly(usize),
    /// This many or more.
    AtLeast(usize),
    /// A multiple of this.
    MultipleOf(usize),
}

/// A rule that a number must keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Equal to.
    Equal(i64),
    /// Greater than or equal to.
    AtLeast(i64),
    /// Less than or equal to.
    AtMost(i64),
    /// Not less than the entry before it.
    NotBelowPrevious(i64),
    /// At least the number of query tokens of the same request.
    NotBelowQueryLength(i64),
    /// Either -1 or at least 1.
    MinusOneOrPositive,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exactly(n) => write!(f, "{n}"),
            Self::AtLeast(n) => write!(f, "at least {n}"),
            Self::MultipleOf(n) => write!(f, "a multiple of {n}"),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Equal(v) => write!(f, "be {v}"),
            Self::AtLeast(v) => write!(f, "be at least {v}"),
            Self::AtMost(v) => write!(f, "be at most {v}"),
            Self::NotBelowPrevious(v) => write!(f, "not be less than the entry before it, {v}"),
            Self::NotBelowQueryLength(v) => {
                write!(
                    f,
                    "not be less than the request's {v} query tokens, which it includes"
                )
            }
            Self::MinusOneOrPositive => write!(f, "be -1 (no limit) or at least 1"),
        }
    }
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length {
                argument,
                actual,
                expected,
            } => {
                write!(f, "{argument} has {actual} entries, expected {expected}")
            }
            Self::Entry {
                argument,
                index,
                value,
                rule,
            } => {
                write!(f, "{argument}[{index}] is {value}, must {rule}")
            }
            Self::Number {
                argument,
                value,
                rule,
            } => write!(f, "{argument} is {value}, must {rule}"),
            Self::Capacity {
                what,
                needed,
                available,
            } => {
                write!(
                    f,
                    "{what}: the batch needs {needed}, there is room for {available}"
                )
            }
            Self::Name {
                argument,
                value,
                known,
            } => write!(f, "{argument} is {value:?}, known are {known}"),
            Self::State { message } => f.write_str(message),
        }
    }
}

impl std::error::Error for PlanError {}
