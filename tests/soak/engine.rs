//! The engine that a soak serves: requests that come, are prefilled in chunks, decode with drafts, and go.

use crate::{MAX_REQUESTS, MAX_ROWS};

/// Numbers that depend on the seed alone (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`.
    fn below(&mut self, end: i32) -> i32 {
        i32::try_from(self.next() % u64::try_from(end).unwrap()).unwrap()
    }
}

/// A request that runs: tokens computed, tokens of its prompt, tokens to generate, and what the last step rejected.
#[derive(Clone, Copy)]
struct Request {
    computed: i32,
    prompt: i32,
    left: i32,
    rejected: i32,
}

/// How the engine is used for a stretch.
#[derive(Clone, Copy)]
pub(crate) struct Habits {
    pub(crate) running: usize,
    pub(crate) drafts: i32,
    /// 0 and 1 for exact lengths, 2 for bounds, 3 for none.
    pub(crate) kind: i32,
    pub(crate) deferred: bool,
}

/// The step's arrays, used again in every step as an engine does.
#[derive(Debug, Default)]
pub(crate) struct Arrays {
    pub(crate) query_start_loc: Vec<i32>,
    pub(crate) seq_lens: Vec<i32>,
    pub(crate) bounds: Vec<i32>,
    pub(crate) pure: bool,
}

pub(crate) struct Engine {
    random: Random,
    pub(crate) habits: Habits,
    requests: Vec<Request>,
    pub(crate) arrays: Arrays,
}

impl Engine {
    pub(crate) fn new(seed: u64) -> Self {
        let habits = Habits {
            running: 1,
            drafts: 0,
            kind: 0,
            deferred: false,
        };
        Self {
            random: Random(seed),
            habits,
            requests: Vec::new(),
            arrays: Arrays::default(),
        }
    }

    pub(crate) fn change_habits(&mut self) {
        let most = [1, 2, 6, 16, MAX_REQUESTS][usize::try_from(self.random.below(5)).unwrap()];
        self.habits = Habits {
            running: most,
            drafts: [0, 3][usize::try_from(self.random.below(2)).unwrap()],
            kind: self.random.below(4),
            deferred: self.random.below(8) == 0,
        };
        self.requests.truncate(most);
        // Every step before the change has come back, so nothing is counted too often.
        for request in &mut self.requests {
            request.rejected = 0;
        }
    }

    /// Fills the arrays with the next batch: decodes, and one chunk of a prompt behind them.
    pub(crate) fn schedule(&mut self) {
        let query = 1 + self.habits.drafts;
        let prefilling = self
            .requests
            .last()
            .is_some_and(|last| last.computed < last.prompt);
        if self.requests.len() < self.habits.running && !prefilling && self.random.below(4) == 0 {
            let prompt = match self.random.below(3) {
                0 => 1 + self.random.below(100),
                1 => 1900 + self.random.below(200),
                _ => 1 + self.random.below(20_000),
            };
            let left = 1 + self.random.below(300);
            self.requests.push(Request {
                computed: 0,
                prompt,
                left,
                rejected: 0,
            });
        }
        let arrays = &mut self.arrays;
        for array in [
            &mut arrays.query_start_loc,
            &mut arrays.seq_lens,
            &mut arrays.bounds,
        ] {
            array.clear();
        }
        arrays.query_start_loc.push(0);
        arrays.pure = true;
        let mut rows = 0;
        for request in &self.requests {
            let missing = request.prompt - request.computed;
            let room = i32::try_from(MAX_ROWS).unwrap() - rows;
            let tokens = if missing > 0 { missing.min(room) } else { query };
            arrays.pure &= missing <= 0;
            rows += tokens;
            arrays.query_start_loc.push(rows);
            arrays.seq_lens.push(request.computed + tokens);
            arrays.bounds.push(request.computed + tokens + request.rejected);
        }
    }

    /// Moves every request on, and lets those go that are done.
    pub(crate) fn apply(&mut self) {
        for position in 0..self.requests.len() {
            let tokens = self.arrays.query_start_loc[position + 1] - self.arrays.query_start_loc[position];
            let request = &mut self.requests[position];
            if request.computed < request.prompt {
                request.computed += tokens;
                continue;
            }
            let accepted = 1 + self.random.below(tokens);
            request.computed += accepted;
            request.left -= accepted;
            request.rejected = tokens - accepted;
        }
        self.requests.retain(|request| request.left > 0);
    }
}
