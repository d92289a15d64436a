#![no_main]

use libfuzzer_sys::fuzz_target;
use phalanx_conformance::fuzz;

fuzz_target!(|data: &[u8]| fuzz::reply_parser(data));
