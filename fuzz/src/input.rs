//! Bytes as numbers.

/// Reads numbers off the front of a fuzzer's bytes; behind their end it reads zeros.
#[derive(Debug)]
pub(crate) struct Input<'a> {
    rest: &'a [u8],
}

impl<'a> Input<'a> {
    pub(crate) fn new(rest: &'a [u8]) -> Self {
        Self { rest }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.rest.split_first() else {
            return 0;
        };
        self.rest = rest;
        first
    }

    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.byte())
    }

    pub(crate) fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// True for one byte in `n`.
    pub(crate) fn one_in(&mut self, n: u8) -> bool {
        self.byte().is_multiple_of(n)
    }

    /// A number below `end`, which is at most 256.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    pub(crate) fn any_i32(&mut self) -> i32 {
        i32::from_le_bytes(self.bytes())
    }

    pub(crate) fn any_u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    pub(crate) fn any_i64(&mut self) -> i64 {
        i64::from_le_bytes(self.bytes())
    }

    pub(crate) fn any_usize(&mut self) -> usize {
        usize::from_le_bytes(self.bytes())
    }

    /// Mostly a small number, at times one near an end of the type or any at all.
    pub(crate) fn number(&mut self) -> i32 {
        match self.byte() {
            small @ 0..=179 => i32::from(small % 60),
            180..=199 => -i32::from(self.byte()),
            200..=219 => i32::MAX - i32::from(self.byte()),
            220..=229 => i32::MIN + i32::from(self.byte()),
            _ => self.any_i32(),
        }
    }
}
