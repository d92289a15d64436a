//! `phalanx bench store` runs, checks what it measures and says so in JSON.

use std::process::Command;

use serde_json::Value;

fn bench(args: &[&str]) -> (Vec<Value>, String, bool) {
    let output = Command::new(env!("CARGO_BIN_EXE_phalanx"))
        .args(["bench", "store", "--seconds", "0.1", "--rounds", "1"])
        // One processor is enough for this, and all that some machines have.
        .args(["--placement", "shared", "--json"])
        .args(args)
        .output()
        .expect("phalanx starts");
    let parse = |line: &str| serde_json::from_str(line).expect("each line is a JSON object");
    let stdout = String::from_utf8(output.stdout).expect("stdout is text");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    (
        stdout.lines().map(parse).collect(),
        stderr,
        output.status.success(),
    )
}

#[test]
fn every_line_is_json_and_verified() {
    let only = "pairs-1-pipelined,pairs-32-torch,barrier,connect,trickle";
    let (lines, stderr, success) = bench(&["--only", only]);
    assert!(success, "{stderr}");
    for line in &lines {
        assert_eq!(line["bench"], "store", "{line}");
        assert_eq!(line["verified"], true, "{line}");
        assert!(
            line["conns"].is_u64() && line["pattern"].is_string(),
            "{line}"
        );
    }
    let of = |case: &str, server: &str| {
        let found = lines
            .iter()
            .find(|l| l["case"] == case && l["server"] == server);
        found
            .unwrap_or_else(|| panic!("no line for {case} of {server}"))
            .clone()
    };
    assert!(of("pairs-1-pipelined", "bare")["pairs_per_s"].as_f64() > Some(0.0));
    assert!(of("pairs-32-torch", "phalanx")["p99_us"].as_f64() > Some(0.0));
    assert!(of("barrier-256-add", "phalanx")["p50_ms"].as_f64() > Some(0.0));
    assert!(of("barrier-256-opcode", "phalanx")["p50_ms"].as_f64() > Some(0.0));
    assert_eq!(
        of("connect-1000", "phalanx")["pattern"],
        "connect,ping,barrier"
    );
    assert!(of("trickle-list", "phalanx")["trickled_bytes"].as_f64() > Some(0.0));
}

#[test]
fn an_unknown_case_is_named_with_the_known_ones() {
    let (lines, stderr, success) = bench(&["--only", "pears"]);
    assert!(!success && lines.is_empty());
    assert!(stderr.contains("pairs-1-torch"), "{stderr}");
}
