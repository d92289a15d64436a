//! `phalanx bench ddp`, with as little work as possible: the averages must be right.

use std::process::Command;

use serde_json::Value;

#[test]
fn every_average_is_checked() {
    for view in [&[][..], &["--view"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_phalanx"))
            .args(["bench", "ddp", "--params", "many-small", "--rounds", "1"])
            .args(["--repeat", "1", "--json"])
            .args(view)
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(found["verified"], true);
        assert_eq!(found["tensors"], 2000);
        assert_eq!(found["view"], !view.is_empty());
        for figure in ["local_ms", "ddp_ms", "sync_ms", "floor_ms"] {
            assert!(found[figure].is_number(), "{figure}");
        }
    }
}

#[test]
fn a_backend_that_is_none_is_an_error() {
    let output = Command::new(env!("CARGO_BIN_EXE_phalanx"))
        .args(["bench", "ddp", "--backend", "pigeons", "--repeat", "1"])
        .output()
        .unwrap();
    assert!(!output.status.success());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("pigeons"), "{errors}");
}
