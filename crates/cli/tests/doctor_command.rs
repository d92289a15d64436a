//! `phalanx doctor` as a process.

use std::process::{Command, Output};

fn doctor(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    for name in [
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LOCAL_RANK",
    ] {
        command.env_remove(name);
    }
    let variables = variables.iter().copied();
    command.arg("doctor").args(args).envs(variables);
    command.output().unwrap()
}

#[test]
fn a_sound_machine_is_described() {
    let output = doctor(&[], &[("PHALANX_TOKEN", "my secret")]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    for expected in [
        "backends built in: ",
        "reference",
        "libgloo",
        "processors",
        "memfd works",
        "open files",
        "127.0.0.1",
        "PHALANX_TOKEN=(9 bytes, not shown)",
    ] {
        assert!(text.contains(expected), "no {expected:?} in\n{text}");
    }
    assert!(!text.contains("my secret"), "{text}");
}

#[test]
fn programs_can_read_it() {
    let output = doctor(&["--json"], &[("NCCL_RINGS", "0 1")]);
    assert_eq!(output.status.code(), Some(0), "a warning is no problem");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let backends = report["backends"].as_array().unwrap();
    assert!(backends.iter().any(|name| name == "reference"), "{report}");
    assert!(report["system"]["processors"].as_u64().unwrap() > 0);
    let findings = report["findings"].as_array().unwrap();
    let obsolete = |finding: &&serde_json::Value| {
        let text = finding["what"].as_str().unwrap();
        finding["level"] == "warning" && text.contains("NCCL_RINGS is obsolete")
    };
    assert!(findings.iter().any(|f| obsolete(&f)), "{report}");
}

#[test]
fn what_keeps_a_rank_from_starting_is_a_problem() {
    for (name, value, expected) in [
        ("PHALANX_TIMEOUT", "soon", "PHALANX_TIMEOUT"),
        ("WORLD_SIZE", "2", "RANK"),
    ] {
        let output = doctor(&[], &[(name, value)]);
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        let (_, problem) = text
            .split_once("PROBLEM")
            .unwrap_or_else(|| panic!("{text}"));
        assert!(problem.contains(expected), "{text}");
    }
}
