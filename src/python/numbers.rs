//! Whole numbers in. `PyO3`'s own integers take a bool for one, and their overflow error does not name the argument.

use std::convert::Infallible;

use pyo3::Borrowed;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::{PlanError, Rule};

/// An argument that should be a whole number. Extraction always succeeds; the error comes where the name is known.
#[derive(Debug, Clone)]
pub(super) enum Number {
    Whole(i64),
    /// More than 64 bits, as text.
    Large(String),
    /// Something else, of that type.
    Other(String),
}

impl<'py> FromPyObject<'_, 'py> for Number {
    type Error = Infallible;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> Result<Self, Infallible> {
        let other = || {
            value
                .get_type()
                .name()
                .map_or_else(|_| "something else".into(), |name| name.to_string())
        };
        if value.is_instance_of::<PyBool>() {
            return Ok(Self::Other(other()));
        }
        Ok(match value.extract::<i64>() {
            Ok(number) => Self::Whole(number),
            Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
                // Thousands of digits have no text.
                Self::Large(
                    value
                        .str()
                        .map_or_else(|_| "huge".into(), |text| text.to_string()),
                )
            }
            Err(_) => Self::Other(other()),
        })
    }
}

impl Number {
    /// As 64 bits.
    pub(super) fn whole(self, argument: &str) -> PyResult<i64> {
        match self {
            Self::Whole(number) => Ok(number),
            Self::Large(text) => Err(PyValueError::new_err(format!(
                "{argument} is {text}, must be a number of at most 64 bits"
            ))),
            Self::Other(kind) => Err(PyTypeError::new_err(format!(
                "{argument} must be a whole number, not {kind}"
            ))),
        }
    }

    /// As 32 bits with a sign, the kernels' integers.
    pub(super) fn int32(self, argument: &'static str) -> PyResult<i32> {
        let wide = self.whole(argument)?;
        i32::try_from(wide).map_err(|_| {
            PlanError::Number {
                argument,
                value: wide,
                rule: limit(wide, i32::MIN.into(), i32::MAX.into()),
            }
            .into()
        })
    }

    /// As 32 bits, not negative.
    pub(super) fn uint32(self, argument: &'static str) -> PyResult<u32> {
        let wide = self.whole(argument)?;
        u32::try_from(wide).map_err(|_| {
            PlanError::Number {
                argument,
                value: wide,
                rule: limit(wide, 0, u32::MAX.into()),
            }
            .into()
        })
    }

    /// As a count, 0 included.
    pub(super) fn count(self, argument: &'static str) -> PyResult<usize> {
        self.at_least(argument, 0)
    }

    /// As a count that is not 0.
    pub(super) fn positive(self, argument: &'static str) -> PyResult<usize> {
        self.at_least(argument, 1)
    }

    fn at_least(self, argument: &'static str, least: i64) -> PyResult<usize> {
        let value = self.whole(argument)?;
        usize::try_from(value)
            .ok()
            .filter(|_| value >= least)
            .ok_or_else(|| {
                PlanError::Number {
                    argument,
                    value,
                    rule: Rule::AtLeast(least),
                }
                .into()
            })
    }
}

fn limit(value: i64, least: i64, most: i64) -> Rule {
    if value < least {
        Rule::AtLeast(least)
    } else {
        Rule::AtMost(most)
    }
}
