//! The examples of the burn front end, as a person starts them.

use phalanx_tests::example::{alone, together, train};

#[test]
fn two_processes_learn_digits_with_burn() {
    train("burn");
}

#[test]
fn digits_run_alone_and_together() {
    let line = "held-out accuracy ";
    alone("burn_digits", &["--epochs", "1"], line);
    together("burn_digits", &["--epochs", "1"], line);
}

#[test]
fn letters_run_alone_and_together() {
    alone("burn_chars", &["--steps", "3"], "step 3 ");
    together("burn_chars", &["--steps", "3"], "step 3 ");
}

#[test]
fn the_benchmark_runs() {
    let few = [
        "--steps",
        "2",
        "--scaling-steps",
        "2",
        "--warm-up",
        "1",
        "--repeat",
        "1",
    ];
    let args = [&few[..], &["--only", "cnn", "--json"]].concat();
    alone(
        "burn_bench",
        &args,
        "{\"bench\":\"train\",\"models\":{\"cnn\":{\"ddp_cpu_ms\":",
    );
}

#[test]
fn the_readmes_program_runs_and_is_the_one_in_the_readme() {
    let top = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let read = |file: &str| std::fs::read_to_string(format!("{top}/{file}")).unwrap();
    let program = read("crates/burn/examples/burn_readme.rs");
    let block = format!("```rs\n{program}```\n");
    assert!(read("README.md").contains(&block), "they have parted");
    together(
        "burn_readme",
        &[],
        "all ranks have the same parameters: true",
    );
}
