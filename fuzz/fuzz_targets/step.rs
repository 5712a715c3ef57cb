#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| mlaplan_fuzz::step::run(data));
