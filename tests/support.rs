//! What aiter supports, against the tables of facts, each written out as a table here.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, where a panic is a failed test"
)]

use mlaplan::schedule::Variant;
use mlaplan::support::{Arch, Dtype, Release, Support, buffer_shapes, support};
use proptest::prelude::*;

use Arch::{Gfx942, Gfx950};
use Dtype::{Bf16, Fp8, Fp16};

fn ask(arch: Arch, heads: usize, q: Dtype, kv: Dtype, release: &str) -> Support {
    support(arch, heads, q, kv, None, release.parse().unwrap())
}

#[test]
fn folds_are_those_seen_at_each_release() {
    // 0: not plannable in that release.
    const RELEASES: [&str; 9] = [
        "0.1.7.post3",
        "0.1.7.post5",
        "0.1.10.post3",
        "0.1.12",
        "0.1.13",
        "0.1.14",
        "0.1.15",
        "0.1.16",
        "0.1.17",
    ];
    let same = |fold| ([fold; 9], fold);
    let table = [
        (Gfx942, Bf16, Bf16, 32, same(2)),
        (Gfx942, Bf16, Bf16, 64, same(4)),
        (Gfx942, Bf16, Bf16, 128, same(8)),
        (Gfx942, Bf16, Fp8, 32, same(2)),
        (Gfx942, Bf16, Fp8, 64, same(4)),
        (Gfx942, Bf16, Fp8, 128, same(8)),
        (Gfx942, Fp8, Fp8, 32, same(2)),
        (Gfx942, Fp8, Fp8, 64, ([4; 9], 1)),
        (Gfx942, Fp8, Fp8, 128, same(1)),
        (Gfx950, Bf16, Bf16, 32, ([2, 2, 2, 2, 2, 1, 1, 1, 1], 1)),
        (Gfx950, Bf16, Bf16, 64, ([4, 4, 4, 4, 4, 1, 1, 1, 1], 1)),
        (Gfx950, Bf16, Bf16, 128, ([8, 8, 8, 8, 1, 1, 1, 1, 1], 1)),
        (Gfx950, Fp8, Fp8, 32, ([2, 2, 2, 2, 2, 2, 1, 2, 1], 1)),
        (Gfx950, Fp8, Fp8, 64, ([4, 4, 4, 0, 1, 1, 1, 1, 1], 1)),
        (Gfx950, Fp8, Fp8, 128, ([1, 1, 1, 8, 8, 1, 1, 1, 1], 1)),
        (Gfx950, Bf16, Fp8, 32, same(2)),
        (Gfx950, Bf16, Fp8, 64, same(4)),
        (Gfx950, Bf16, Fp8, 128, same(8)),
        (Gfx942, Bf16, Bf16, 48, same(3)),
        (Gfx942, Fp8, Fp8, 96, same(6)),
        (Gfx950, Fp8, Fp8, 48, same(3)),
        (Gfx950, Fp8, Fp8, 112, same(7)),
        (Gfx950, Bf16, Bf16, 48, ([3, 3, 3, 3, 0, 0, 0, 0, 0], 1)),
        (Gfx950, Bf16, Bf16, 112, ([7, 7, 7, 7, 0, 0, 0, 0, 0], 1)),
        (Gfx942, Bf16, Bf16, 16, same(1)),
        (Gfx950, Bf16, Fp8, 16, same(1)),
    ];
    for (arch, q, kv, heads, (early, late)) in table {
        let early = RELEASES.into_iter().zip(early);
        for (release, fold) in
            early.chain(["0.1.18", "0.1.20.post1", "0.2.0", "main"].map(|name| (name, late)))
        {
            let found = ask(arch, heads, q, kv, release);
            assert_eq!(
                if found.persistent { found.fold } else { 0 },
                fold,
                "{arch} {q}/{kv} {heads} {release}"
            );
            assert_eq!(found.native, fold == 1, "{arch} {q}/{kv} {heads} {release}");
        }
    }
}

#[test]
fn builds_between_releases_are_refused_where_the_rule_changed_around_them() {
    assert!(!ask(Gfx942, 64, Fp8, Fp8, "0.1.18.dev3+g0123abc").persistent);
    assert!(!ask(Gfx950, 32, Fp8, Fp8, "0.1.16.dev1").persistent);
    assert!(!ask(Gfx950, 128, Fp8, Fp8, "0.1.12.dev1").persistent);
    assert_eq!(ask(Gfx942, 64, Fp8, Fp8, "0.1.19.dev1").fold, 1);
    assert_eq!(ask(Gfx942, 64, Bf16, Bf16, "0.1.18.dev3").fold, 4);
    assert_eq!(ask(Gfx942, 64, Fp8, Fp8, "0.1.17.post2.dev3").fold, 4);
    assert_eq!(ask(Gfx942, 64, Fp8, Fp8, "0.2.0.dev3").fold, 1);
    assert!(!ask(Gfx950, 64, Fp8, Fp8, "0.1.11").persistent);
    assert_eq!(ask(Gfx942, 64, Fp8, Fp8, "0.1.11").fold, 4);
}

#[test]
fn heads_are_padded_to_a_multiple_of_sixteen() {
    for (heads, padded) in [
        (1, 16),
        (4, 16),
        (8, 16),
        (12, 16),
        (16, 16),
        (24, 32),
        (40, 48),
        (127, 128),
        (128, 128),
    ] {
        for arch in [Gfx942, Gfx950] {
            let found = ask(arch, heads, Bf16, Bf16, "main");
            assert!(found.persistent, "{arch} {heads}");
            assert_eq!(found.padded_heads, padded);
            assert_eq!(found.fold, if arch == Gfx950 { 1 } else { padded / 16 });
            assert_eq!(
                found.reason.contains("padded"),
                heads != padded,
                "{}",
                found.reason
            );
        }
    }
}

#[test]
fn what_cannot_be_planned_has_a_reason() {
    let refused = [
        (0, Bf16, Bf16, "without heads"),
        (129, Bf16, Bf16, "more than 128 heads"),
        (usize::MAX, Bf16, Bf16, "more than 128 heads"),
        (16, Fp16, Fp16, "bf16/bf16"),
        (16, Fp8, Bf16, "bf16/bf16"),
        (16, Bf16, Fp16, "bf16/bf16"),
    ];
    for (heads, q, kv, part) in refused {
        let found = ask(Gfx950, heads, q, kv, "main");
        assert!(!found.persistent && !found.plan_used && !found.lse && !found.native);
        assert!(!found.non_persistent, "{heads} {q} {kv}");
        assert_eq!((found.fold, found.variant), (1, None));
        assert!(found.reason.contains(part), "{}", found.reason);
    }
}

#[test]
fn fallback_is_offered_only_where_there_is_one() {
    let table = [
        (Gfx942, Bf16, Bf16, &[16, 32, 128][..]),
        (Gfx942, Fp8, Fp8, &[16, 128]),
        (Gfx942, Bf16, Fp8, &[]),
        (Gfx950, Bf16, Bf16, &[16, 32, 64, 128]),
        (Gfx950, Fp8, Fp8, &[16, 128]),
        (Gfx950, Bf16, Fp8, &[]),
    ];
    for (arch, q, kv, with) in table {
        for heads in (16..=128).step_by(16) {
            let found = ask(arch, heads, q, kv, "main").non_persistent;
            assert_eq!(found, with.contains(&heads), "{arch} {q}/{kv} {heads}");
        }
    }
    assert!(ask(Gfx942, 8, Fp8, Fp8, "main").non_persistent);
}

#[test]
fn lse_needs_a_kernel_that_is_listed_with_it() {
    for heads in (16..=128).step_by(16) {
        assert_eq!(ask(Gfx942, heads, Fp8, Fp8, "main").lse, heads == 64, "{heads}");
        assert!(ask(Gfx950, heads, Bf16, Bf16, "main").lse);
        assert!(ask(Gfx950, heads, Fp8, Fp8, "main").lse);
        for (arch, q, kv) in [(Gfx942, Bf16, Bf16), (Gfx942, Bf16, Fp8), (Gfx950, Bf16, Fp8)] {
            assert!(!ask(arch, heads, q, kv, "main").lse, "{arch} {heads}");
        }
        assert!(!ask(Gfx950, heads, Bf16, Bf16, "0.1.11").lse);
    }
}

#[test]
fn gate_drops_the_plan_of_large_batches() {
    let used = |arch, heads, kv, rows, release: &str| {
        support(arch, heads, Bf16, kv, rows, release.parse().unwrap()).plan_used
    };
    assert!(used(Gfx950, 16, Bf16, Some(31), "0.1.18"));
    assert!(!used(Gfx950, 16, Bf16, Some(32), "0.1.18"));
    assert!(!used(Gfx950, 8, Bf16, Some(4096), "main"));
    assert!(used(Gfx950, 16, Bf16, Some(32), "0.1.17"));
    assert!(used(Gfx950, 16, Bf16, None, "main"));
    assert!(used(Gfx950, 32, Bf16, Some(32), "main"));
    assert!(used(Gfx950, 16, Fp8, Some(32), "main"));
    assert!(used(Gfx942, 16, Bf16, Some(32), "main"));
}

#[test]
fn variant_is_known_where_it_does_not_depend_on_the_rows() {
    let variant = |arch, heads, rows, release: &str| {
        support(arch, heads, Bf16, Bf16, rows, release.parse().unwrap()).variant
    };
    let (parallel, serial) = (Some(Variant::Parallel), Some(Variant::Serial));
    assert_eq!(variant(Gfx942, 16, None, "main"), None);
    assert_eq!(variant(Gfx942, 16, Some(3276), "main"), parallel);
    assert_eq!(variant(Gfx942, 16, Some(3277), "main"), serial);
    assert_eq!(variant(Gfx950, 128, Some(8191), "main"), parallel);
    assert_eq!(variant(Gfx950, 128, Some(8192), "main"), serial);
    assert_eq!(variant(Gfx942, 128, None, "main"), serial);
    for (release, expected) in [
        ("0.1.7.post5", serial),
        ("0.1.16", serial),
        ("0.1.16.post3", serial),
        ("0.1.16.post4", parallel),
        ("0.1.16.post6", parallel),
        ("0.1.17", parallel),
    ] {
        assert_eq!(variant(Gfx942, 16, Some(8), release), expected, "{release}");
    }
    assert_eq!(variant(Gfx942, 16, None, "0.1.16"), serial);
}

#[test]
fn buffers_have_aiters_shapes() {
    // Tiles per row of (arch, q, kv) at 16, 32, 48, 64, 80, 96, 112 and 128 heads.
    let table = [
        (Gfx942, Bf16, Bf16, [1, 2, 3, 4, 5, 6, 7, 8]),
        (Gfx942, Bf16, Fp8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (Gfx942, Fp8, Fp8, [1, 2, 3, 1, 5, 6, 7, 1]),
        (Gfx950, Bf16, Bf16, [1, 2, 3, 1, 1, 1, 1, 1]),
        (Gfx950, Bf16, Fp8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (Gfx950, Fp8, Fp8, [1, 2, 3, 1, 5, 6, 7, 1]),
    ];
    for (arch, q, kv, per_row) in table {
        for (heads, m) in (16..).step_by(16).zip(per_row) {
            for (rows, cus) in [(1, 1), (1, 304), (753, 228), (4096, 256)] {
                let shapes = buffer_shapes(rows, heads, arch, cus, q, kv).unwrap();
                assert_eq!(shapes.work_metadata_ptrs, 2);
                assert_eq!(shapes.work_indptr, cus + 1);
                assert_eq!(
                    shapes.work_info_set,
                    [(rows + cus - 1) * m, 8],
                    "{arch} {q}/{kv} {heads}"
                );
                assert_eq!(shapes.reduce_indptr, rows * m + 1);
                assert_eq!(shapes.reduce_final_map, [rows * m, 2]);
                assert_eq!(shapes.reduce_partial_map, m * (rows + cus - 1).min(2 * (cus - 1)));
            }
            let padded = buffer_shapes(9, heads - 8, arch, 304, q, kv);
            assert_eq!(padded, buffer_shapes(9, heads, arch, 304, q, kv));
        }
    }
    for (heads, cus) in [(0, 304), (129, 304), (16, 0), (16, usize::MAX)] {
        assert!(buffer_shapes(1, heads, Gfx942, cus, Bf16, Bf16).is_err());
    }
}

fn any_arch() -> impl Strategy<Value = Arch> {
    prop_oneof![Just(Gfx942), Just(Gfx950)]
}

fn any_dtype() -> impl Strategy<Value = Dtype> {
    prop_oneof![Just(Bf16), Just(Fp16), Just(Fp8)]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn buffers_hold_every_plan_of_the_newest_release(
        arch in any_arch(), heads in 1..129_usize, q in any_dtype(), kv in any_dtype(), rows in 0..5000_usize,
        cus in 1..400_usize,
    ) {
        let fold = support(arch, heads, q, kv, Some(rows), Release::NEWEST).fold;
        let shapes = buffer_shapes(rows, heads, arch, cus, q, kv).unwrap();
        let tiles = rows * fold;
        prop_assert!(shapes.reduce_indptr > tiles);
        prop_assert!(shapes.reduce_final_map[0] >= tiles);
        prop_assert!(shapes.work_info_set[0] >= (tiles + cus).saturating_sub(1));
        prop_assert!(shapes.reduce_partial_map >= (tiles + cus).saturating_sub(1).min(2 * (cus - 1)));
    }

    #[test]
    fn any_answer_is_consistent(
        arch in any_arch(), heads in any::<usize>().prop_map(|heads| heads % 300), q in any_dtype(),
        kv in any_dtype(), rows in any::<Option<usize>>(), patch in 8..25_u32, post in 0..8_u32, dev in any::<bool>(),
    ) {
        let name = format!("v0.1.{patch}.post{post}{}", if dev { ".dev1" } else { "" });
        let found = support(arch, heads, q, kv, rows, name.parse().unwrap());
        prop_assert!(!found.reason.is_empty());
        prop_assert!(found.persistent || !(found.native || found.lse || found.plan_used));
        prop_assert_eq!(found.persistent, found.native || found.fold > 1);
        if found.persistent {
            prop_assert!(found.padded_heads >= heads && found.padded_heads.is_multiple_of(16));
            prop_assert!(found.native || found.fold * 16 == found.padded_heads);
        }
    }

    #[test]
    fn no_name_panics(name in ".{0,24}") {
        let _ = name.parse::<Release>();
        let _ = name.parse::<Arch>();
        let _ = name.parse::<Dtype>();
    }

    #[test]
    fn no_version_like_name_panics(name in "v?[0-9]{1,11}(\\.(post|dev)?[0-9]{0,11}){0,6}(\\+[a-z]{0,3})?") {
        let _ = name.parse::<Release>();
    }
}
