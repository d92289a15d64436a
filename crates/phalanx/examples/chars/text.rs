//! The text that the examples with letters learn from, and their command line. A part of programs,
//! not one itself: `burn_chars` and `candle_chars` have this file.

use std::error::Error;
use std::process::ExitCode;

/// Inside the program, so that it runs in any directory and under any launcher.
const PAGES: [&str; 6] = [
    include_str!("../../../../docs/architecture.md"),
    include_str!("../../../../docs/process-groups.md"),
    include_str!("../../../../docs/ddp.md"),
    include_str!("../../../../docs/store.md"),
    include_str!("../../../../docs/launching.md"),
    include_str!("../../../../docs/debugging.md"),
];

/// Letters that a model sees at once.
pub(crate) const LENGTH: usize = 48;

/// Learn to write, letter by letter, with all ranks of a job.
#[derive(clap::Parser)]
pub(crate) struct Args {
    /// Steps of training
    #[arg(long, default_value_t = 400)]
    pub(crate) steps: usize,

    /// Letters to write at the end
    #[arg(long, default_value_t = 300)]
    pub(crate) letters: usize,
}

impl Args {
    /// Whether to show how it goes after this step.
    pub(crate) fn shows(&self, step: usize) -> bool {
        step.is_multiple_of(50) || step == self.steps
    }
}

/// How the program ends.
pub(crate) fn end(result: Result<(), Box<dyn Error>>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            eprintln!("error: {err}");
            ExitCode::FAILURE
        }
    }
}

/// Text as numbers, one for each letter that occurs.
pub(crate) struct Text {
    alphabet: Vec<char>,
    numbers: Vec<i64>,
}

impl Text {
    pub(crate) fn new() -> Self {
        let text = PAGES.concat();
        let mut alphabet: Vec<char> = text.chars().collect();
        alphabet.sort_unstable();
        alphabet.dedup();
        let number = |letter| alphabet.binary_search(&letter).expect("it occurs") as i64;
        Self {
            numbers: text.chars().map(number).collect(),
            alphabet,
        }
    }

    /// How many different letters there are.
    pub(crate) fn letters(&self) -> usize {
        self.alphabet.len()
    }

    /// Pieces of one letter more than [`LENGTH`], from other places for each `turn`.
    pub(crate) fn pieces(&self, count: usize, turn: usize) -> Vec<Vec<i64>> {
        let places = self.numbers.len() - LENGTH - 1;
        let mut random = Random(turn as u64);
        let piece = |_| self.numbers[random.below(places)..][..=LENGTH].to_vec();
        (0..count).map(piece).collect()
    }

    /// Writes so many letters, each by the scores that `score` gives for what follows.
    pub(crate) fn write(&self, letters: usize, score: impl Fn(&[i64]) -> Vec<f32>) -> String {
        let mut random = Random(7);
        let mut numbers = self.numbers[..LENGTH].to_vec();
        for _ in 0..letters {
            let scores = score(&numbers[numbers.len() - LENGTH..]);
            let top = scores.iter().copied().fold(f32::MIN, f32::max);
            // Sharper than the scores say, which suits a model that has learned little.
            let weights: Vec<f32> = scores
                .iter()
                .map(|score| ((score - top) / 0.7).exp())
                .collect();
            let mut left = random.unit() * weights.iter().sum::<f32>();
            let chosen = weights.iter().position(|weight| {
                left -= weight;
                left <= 0.0
            });
            numbers.push(chosen.unwrap_or(0) as i64);
        }
        let letter = |&number: &i64| self.alphabet[number as usize];
        numbers[LENGTH..].iter().map(letter).collect()
    }
}

/// The upper bits of a linear congruential generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        let mixed = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = mixed.wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn unit(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 31) as f32
    }
}
