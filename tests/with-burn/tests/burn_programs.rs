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
