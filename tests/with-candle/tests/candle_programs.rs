//! The examples of the candle front end, as a person starts them.

use phalanx_tests::example::{alone, together, train};

#[test]
fn two_processes_learn_digits_with_candle() {
    train("candle");
}

#[test]
fn digits_run_alone_and_together() {
    let line = "held-out accuracy ";
    alone("candle_digits", &["--epochs", "1"], line);
    together("candle_digits", &["--epochs", "1"], line);
}

#[test]
fn letters_run_alone_and_together() {
    alone("candle_chars", &["--steps", "3"], "step 3 ");
    together("candle_chars", &["--steps", "3"], "step 3 ");
}
