//! Names that users write: GPU families, dtypes and aiter releases.

use std::fmt;
use std::str::FromStr;

use crate::PlanError;

/// GPU family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arch {
    /// MI300X, MI325X.
    Gfx942,
    /// MI350X, MI355X.
    Gfx950,
}

impl Arch {
    /// Bytes of LDS that a work-group may use.
    pub fn lds_bytes(self) -> usize {
        match self {
            Self::Gfx942 => 64 << 10,
            Self::Gfx950 => 160 << 10,
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gfx942 => "gfx942",
            Self::Gfx950 => "gfx950",
        })
    }
}

impl FromStr for Arch {
    type Err = PlanError;

    /// Takes the name alone or with target features behind it, such as "gfx942:sramecc+:xnack-".
    fn from_str(name: &str) -> Result<Self, PlanError> {
        match name.split(':').next() {
            Some("gfx942") => Ok(Self::Gfx942),
            Some("gfx950") => Ok(Self::Gfx950),
            _ => Err(PlanError::Name {
                argument: "arch",
                value: name.into(),
                known: "gfx942, gfx950",
            }),
        }
    }
}

/// Element type of the queries or of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    Fp16,
    /// Any 8-bit float; aiter looks at no more than that.
    Fp8,
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp8 => "fp8",
        })
    }
}

impl FromStr for Dtype {
    type Err = PlanError;

    fn from_str(name: &str) -> Result<Self, PlanError> {
        match name {
            "bf16" | "bfloat16" => Ok(Self::Bf16),
            "fp16" | "float16" => Ok(Self::Fp16),
            "fp8" | "fp8_e4m3" | "float8_e4m3fn" | "float8_e4m3fnuz" => Ok(Self::Fp8),
            _ => Err(PlanError::Name {
                argument: "dtype",
                value: name.into(),
                known: "bf16, bfloat16, fp16, float16, fp8, fp8_e4m3, float8_e4m3fn, float8_e4m3fnuz",
            }),
        }
    }
}

/// An aiter release, ordered in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Release {
    number: [u32; 3],
    /// 0 for what comes before the release itself, 1 for the release, then two per post-release.
    stage: u32,
}

impl Release {
    /// The newest: also what "main" and no name stand for.
    pub const NEWEST: Self = Self {
        number: [u32::MAX; 3],
        stage: 1,
    };
    /// The oldest whose planner is told the dtypes.
    const OLDEST: Self = Self::post(7, 3);

    /// 0.1.`patch`.post`post`.
    const fn post(patch: u32, post: u32) -> Self {
        Self {
            number: [0, 1, patch],
            stage: 2 * post + 1,
        }
    }

    /// Whether this is 0.1.`patch` or later, its own pre-releases not counted.
    pub(super) fn since(self, patch: u32) -> bool {
        self >= Self::post(patch, 0)
    }

    /// Whether this is one of 0.1.`patch`, its post-releases and its pre-releases.
    pub(super) fn is_of(self, patch: u32) -> bool {
        self.number == [0, 1, patch]
    }

    /// The tagged releases before and after a build between tags; twice itself for a tagged release.
    pub(super) fn around(self) -> [Self; 2] {
        let [major, minor, patch] = self.number;
        match self.stage {
            stage if stage % 2 == 1 => [self; 2],
            0 => {
                // The last post-release of the number before; past a minor release all rules are the newest.
                let before = [major, minor, patch.saturating_sub(1)];
                [
                    Self {
                        number: before,
                        stage: u32::MAX,
                    },
                    Self { stage: 1, ..self },
                ]
            }
            stage => [
                Self {
                    stage: stage - 1,
                    ..self
                },
                Self {
                    stage: stage + 1,
                    ..self
                },
            ],
        }
    }

    pub(super) fn has_parallel_planner(self) -> bool {
        self.since(17) || (self.is_of(16) && self >= Self::post(16, 4))
    }

    fn parse_known(name: &str) -> Option<Self> {
        let public = name.split('+').next()?;
        let mut parts = public.strip_prefix('v').unwrap_or(public).split('.');
        let mut number = [0; 3];
        for entry in &mut number {
            *entry = parse_digits(parts.next()?)?;
        }
        let mut stage = 1;
        let mut part = parts.next();
        if let Some(post) = part.and_then(|part| part.strip_prefix("post")) {
            stage = parse_digits(post)?.checked_mul(2)?.checked_add(1)?;
            part = parts.next();
        }
        if let Some(dev) = part {
            // Commits that lead to the release named, so just before it.
            parse_digits(dev.strip_prefix("dev")?)?;
            stage -= 1;
        }
        if parts.next().is_some() {
            return None;
        }
        Some(Self { number, stage })
    }
}

impl FromStr for Release {
    type Err = PlanError;

    /// Takes "0.1.18", "v0.1.7.post5", "0.1.21.dev3+g0123abc" or "main". Refuses what is older than v0.1.7.post3.
    fn from_str(name: &str) -> Result<Self, PlanError> {
        if name == "main" {
            return Ok(Self::NEWEST);
        }
        match Self::parse_known(name) {
            Some(release) if release >= Self::OLDEST => Ok(release),
            _ => Err(PlanError::Name {
                argument: "aiter_version",
                value: name.into(),
                known: "main and the releases from v0.1.7.post3 on",
            }),
        }
    }
}

/// Digits alone: `u32::from_str` would take a sign.
fn parse_digits(text: &str) -> Option<u32> {
    text.bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release(name: &str) -> Release {
        name.parse().unwrap()
    }

    #[test]
    fn releases_are_ordered_in_time() {
        let names = [
            "v0.1.7.post3",
            "0.1.7.post5",
            "0.1.8",
            "0.1.10.post2",
            "v0.1.12.dev4+g0123abc",
            "0.1.12",
            "0.1.16.post4.dev2",
            "0.1.16.post4",
            "0.1.17",
            "0.2.0",
            "main",
        ];
        let parsed = names.map(release);
        let sorted = parsed.is_sorted_by(|a, b| a <= b);
        assert!(sorted, "{parsed:?}");
        assert_eq!(release("v0.1.18"), release("0.1.18+rocm7"));
        assert_eq!(release("main"), Release::NEWEST);
    }

    #[test]
    fn old_and_odd_releases_are_refused() {
        let refused = [
            "",
            "v",
            "0",
            "0.1",
            "0.1.6",
            "0.1.7",
            "0.1.7.post2",
            "0.1.7.post2.dev18",
            "0.1.7.post3.dev1",
            "0.1.x",
            "0.1.18rc1",
            "0.1.18.post",
            "0.1.+18",
            "-0.1.18",
            "0.1.18.dev",
            "0.1.99999999999",
            "0.1.18.post4294967295",
            "0.1.18.dev3.post1",
            "0.1.18.dev3.1",
            "0.1.18 ",
            "newest",
        ];
        for name in refused {
            assert!(name.parse::<Release>().is_err(), "{name:?}");
        }
    }

    #[test]
    fn names_are_parsed() {
        assert_eq!("gfx942:sramecc+:xnack-".parse(), Ok(Arch::Gfx942));
        assert_eq!("gfx950".parse(), Ok(Arch::Gfx950));
        assert!("gfx90a".parse::<Arch>().is_err());
        assert!("".parse::<Arch>().is_err());
        for (name, dtype) in [
            ("bf16", Dtype::Bf16),
            ("bfloat16", Dtype::Bf16),
            ("fp16", Dtype::Fp16),
        ] {
            assert_eq!(name.parse(), Ok(dtype));
        }
        assert_eq!("float16".parse(), Ok(Dtype::Fp16));
        assert_eq!("float8_e4m3fnuz".parse(), Ok(Dtype::Fp8));
        assert!(
            "fp32"
                .parse::<Dtype>()
                .unwrap_err()
                .to_string()
                .starts_with("dtype is \"fp32\"")
        );
    }
}
