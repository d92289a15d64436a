//! Medians of the rounds, as a table or as JSON lines.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::cases::Case;
use super::servers::Kind;
use crate::bench::cpu::Placement;
use crate::bench::load::Sample;
use crate::bench::stats::median;

/// What one server reached in one case.
pub(crate) struct Outcome {
    pub(crate) kind: Kind,
    pub(crate) samples: Vec<Sample>,
    /// Why there are none.
    pub(crate) skipped: Option<String>,
}

impl Outcome {
    pub(crate) fn is_verified(&self) -> bool {
        !self.samples.is_empty() && self.samples.iter().all(|s| s.problem.is_none())
    }

    pub(crate) fn problem(&self) -> Option<&str> {
        self.samples.iter().find_map(|s| s.problem.as_deref())
    }

    /// The median of each figure over the rounds that have it.
    pub(crate) fn figures(&self) -> BTreeMap<&str, f64> {
        let mut values: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for (name, value) in self.samples.iter().flat_map(|s| &s.figures) {
            values.entry(name).or_default().push(*value);
        }
        values.iter().map(|(name, v)| (*name, median(v))).collect()
    }
}

/// The outcomes of one case.
pub(crate) struct Comparison {
    pub(crate) case: Case,
    pub(crate) placement: Placement,
    pub(crate) outcomes: Vec<Outcome>,
}

impl Comparison {
    fn figures_of(&self, kind: Kind) -> BTreeMap<&str, f64> {
        let outcome = self.outcomes.iter().find(|o| o.kind == kind);
        outcome.map(Outcome::figures).unwrap_or_default()
    }

    /// Ours divided by libuv's.
    fn ratios(&self) -> BTreeMap<&str, f64> {
        let theirs = self.figures_of(Kind::Libuv);
        let ours = self.figures_of(Kind::Phalanx).into_iter();
        ours.filter_map(|(name, ours)| Some((name, ours / theirs.get(name)?)))
            .filter(|(_, ratio)| ratio.is_finite())
            .collect()
    }

    /// One object per server.
    pub(crate) fn json_lines(&self) -> Vec<Value> {
        self.outcomes.iter().map(|o| self.json(o)).collect()
    }

    fn json(&self, outcome: &Outcome) -> Value {
        let mut line = Map::new();
        let mut put = |name: &str, value: Value| line.insert(name.into(), value);
        put("bench", json!("store"));
        put("case", json!(self.case.name));
        put("server", json!(outcome.kind.name()));
        put("conns", json!(self.case.conns()));
        put("pattern", json!(self.case.pattern()));
        put(
            "placement",
            json!(format!("{:?}", self.placement).to_lowercase()),
        );
        put("rounds", json!(outcome.samples.len()));
        for (name, value) in outcome.figures() {
            put(name, json!(value));
        }
        if outcome.kind == Kind::Phalanx {
            let ratios = self.ratios();
            if !ratios.is_empty() {
                put("ratio_to_libuv", json!(ratios));
            }
        }
        match &outcome.skipped {
            Some(reason) => put("skipped", json!(reason)),
            None => put("verified", json!(outcome.is_verified())),
        };
        if let Some(problem) = outcome.problem() {
            put("problem", json!(problem));
        }
        Value::Object(line)
    }

    /// Rows of the table: one per figure.
    pub(crate) fn table(&self) -> Vec<String> {
        let kinds = [Kind::Bare, Kind::Phalanx, Kind::Libuv];
        let figures = kinds.map(|kind| self.figures_of(kind));
        let ratios = self.ratios();
        let names: std::collections::BTreeSet<&str> =
            figures.iter().flat_map(|f| f.keys().copied()).collect();
        let mut rows = Vec::new();
        for name in names {
            let [bare, phalanx, libuv] = figures.each_ref().map(|f| show(f.get(name)));
            let ratio = ratios.get(name).map_or("-".into(), |r| format!("{r:.3}"));
            rows.push(row([self.case.name, name, &bare, &phalanx, &libuv, &ratio]));
        }
        for outcome in &self.outcomes {
            let server = outcome.kind.name();
            if let Some(reason) = &outcome.skipped {
                rows.push(format!(
                    "| {} | {server} skipped: {reason} |",
                    self.case.name
                ));
            } else if let Some(problem) = outcome.problem() {
                rows.push(format!(
                    "| {} | {server} FAILED: {problem} |",
                    self.case.name
                ));
            }
        }
        rows
    }
}

/// The head of the table.
pub(crate) fn head() -> [String; 2] {
    let names = row([
        "case",
        "figure",
        "bare",
        "phalanx",
        "libuv",
        "phalanx/libuv",
    ]);
    let rule = "|---|---|--:|--:|--:|--:|".to_owned();
    [names, rule]
}

fn row([case, figure, bare, phalanx, libuv, ratio]: [&str; 6]) -> String {
    format!("| {case:<18} | {figure:<23} | {bare:>9} | {phalanx:>9} | {libuv:>10} | {ratio:>13} |")
}

fn show(value: Option<&f64>) -> String {
    match value {
        None => "-".into(),
        Some(v) if *v >= 100.0 => format!("{v:.0}"),
        Some(v) => format!("{v:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::cases::CASES;
    use super::*;

    fn outcome(kind: Kind, values: &[f64]) -> Outcome {
        let sample = |v: &f64| Sample {
            figures: BTreeMap::from([("p50_us".to_owned(), *v)]),
            problem: None,
        };
        Outcome {
            kind,
            samples: values.iter().map(sample).collect(),
            skipped: None,
        }
    }

    fn comparison(outcomes: Vec<Outcome>) -> Comparison {
        Comparison {
            case: CASES[0],
            placement: Placement::Free,
            outcomes,
        }
    }

    #[test]
    fn lines_carry_medians_and_ours_the_ratio() {
        let ours = outcome(Kind::Phalanx, &[1.0, 90.0, 2.0]);
        let theirs = outcome(Kind::Libuv, &[4.0, 4.0]);
        let lines = comparison(vec![ours, theirs]).json_lines();
        assert_eq!(lines[0]["p50_us"], 2.0);
        assert_eq!(lines[0]["ratio_to_libuv"]["p50_us"], 0.5);
        assert_eq!(lines[0]["verified"], true);
        assert_eq!(lines[1]["server"], "libuv");
        assert!(lines[1].get("ratio_to_libuv").is_none());
    }

    #[test]
    fn one_wrong_answer_spoils_the_verdict() {
        let mut ours = outcome(Kind::Phalanx, &[1.0, 2.0]);
        ours.samples[1].problem = Some("wrong value".into());
        let all = comparison(vec![ours]);
        let line = &all.json_lines()[0];
        assert_eq!(line["verified"], false);
        assert_eq!(line["problem"], "wrong value");
        assert!(all.table().last().unwrap().contains("FAILED: wrong value"));
    }

    #[test]
    fn a_skipped_server_says_why_and_claims_nothing() {
        let mut theirs = outcome(Kind::Libuv, &[]);
        theirs.skipped = Some("no private mounts here".into());
        let line = &comparison(vec![theirs]).json_lines()[0];
        assert_eq!(line["skipped"], "no private mounts here");
        assert!(line.get("verified").is_none());
    }
}
