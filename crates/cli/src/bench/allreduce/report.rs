//! Medians of the rounds, as a table or as JSON lines.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::contestants::Kind;
use super::window::{Dtype, Memory, Window};
use crate::bench::stats::{Estimate, median};

/// Below this the roof is nothing to compare with: operations are all waiting.
const ROOF_FROM_BYTES: usize = 64 << 10;

/// The windows of one contestant.
pub(crate) struct Series {
    pub(crate) kind: Kind,
    pub(crate) memory: Memory,
    pub(crate) dtype: Dtype,
    /// Which world runs them.
    pub(crate) world: usize,
    /// Why there are none.
    pub(crate) missing: Option<String>,
    /// Why there are no more.
    pub(crate) failed: Option<String>,
    cells: BTreeMap<usize, Cell>,
}

/// The windows of one size.
#[derive(Default)]
struct Cell {
    p50_us: Vec<f64>,
    min_us: Vec<f64>,
    iters: usize,
    wrong: u64,
}

impl Series {
    pub(crate) fn new(
        kind: Kind,
        memory: Memory,
        dtype: Dtype,
        world: usize,
        missing: Option<String>,
    ) -> Self {
        Self {
            kind,
            memory,
            dtype,
            world,
            missing,
            failed: None,
            cells: BTreeMap::new(),
        }
    }

    pub(crate) fn record(&mut self, window: &Window, p50_us: f64, min_us: f64, wrong: u64) {
        let cell = self.cells.entry(window.bytes).or_default();
        cell.p50_us.push(p50_us);
        cell.min_us.push(min_us);
        cell.iters = window.iters;
        cell.wrong += wrong;
    }

    /// What it is called where memory and type make a difference.
    pub(crate) fn label(&self) -> String {
        let plain = matches!(self.kind, Kind::Own(_)) && self.memory == Memory::Plain;
        let what = match (plain, self.dtype) {
            (false, Dtype::F32) => return self.kind.name().to_owned(),
            (true, Dtype::F32) => "plain".to_owned(),
            (false, other) => other.name().to_owned(),
            (true, other) => format!("plain {}", other.name()),
        };
        format!("{} ({what})", self.kind.name())
    }

    pub(crate) fn p50_us(&self, bytes: usize) -> Option<f64> {
        self.cells.get(&bytes).map(|cell| median(&cell.p50_us))
    }

    /// How many times as long it takes as another: the median of the ratios of the rounds, with its
    /// interval. Not the ratio of the medians: what the machine is like may change between rounds.
    fn over(&self, other: &Series, bytes: usize) -> Option<Estimate> {
        let of = |series: &'_ Self| Some(series.cells.get(&bytes)?.p50_us.clone());
        let rounds = of(self)?.into_iter().zip(of(other)?);
        Estimate::of(&rounds.map(|(a, b)| a / b).collect::<Vec<_>>())
    }

    fn problem(&self, bytes: usize) -> Option<String> {
        match self.cells.get(&bytes) {
            Some(cell) if cell.wrong > 0 => {
                Some(format!("{bytes} bytes: {} wrong elements", cell.wrong))
            }
            _ => None,
        }
    }
}

/// All contestants with one number of ranks.
pub(crate) struct Comparison {
    pub(crate) ranks: usize,
    pub(crate) pinned: bool,
    /// How many hosts, if they are pretended ones.
    pub(crate) hosts: Option<usize>,
    pub(crate) sizes: Vec<usize>,
    pub(crate) series: Vec<Series>,
    /// What a word takes from the first processor to the second and back, whenever it was measured.
    pub(crate) distances_ns: Vec<f64>,
}

impl Comparison {
    /// The element types that are summed.
    pub(crate) fn dtypes(&self) -> String {
        let mut names: Vec<&str> = Vec::new();
        for series in self.contestants() {
            let name = series.dtype.name();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names.join(" and ")
    }

    /// The quickest of those that `which` chooses.
    fn best(&self, bytes: usize, which: impl Fn(&Series) -> bool) -> Option<&Series> {
        let chosen = self.series.iter().filter(|series| which(series));
        let timed = chosen.filter_map(|series| Some((series.p50_us(bytes)?, series)));
        let best = timed.min_by(|(a, _), (b, _)| a.total_cmp(b));
        best.map(|(_, series)| series)
    }

    fn roof(&self, bytes: usize) -> Option<&Series> {
        self.best(bytes, |series| series.kind == Kind::Roof)
    }

    fn over_roof(&self, series: &Series, bytes: usize) -> Option<f64> {
        let roof = self.roof(bytes).filter(|_| bytes >= ROOF_FROM_BYTES)?;
        Some(series.over(roof, bytes)?.median)
    }

    /// How many times as long PyTorch's gloo and the better of the MPIs take.
    fn ratios(&self, series: &Series, bytes: usize) -> [Option<Estimate>; 2] {
        let alike = |other: &Series| other.dtype == series.dtype;
        let gloo = |other: &Series| other.kind == Kind::TorchGloo && alike(other);
        let is_mpi = |kind: &Kind| matches!(kind, Kind::OpenMpi | Kind::IntelMpi);
        let mpi = |other: &Series| is_mpi(&other.kind) && alike(other);
        let (gloo, mpi) = (self.best(bytes, gloo), self.best(bytes, mpi));
        [gloo, mpi].map(|theirs| {
            let ours = matches!(series.kind, Kind::Own(_)).then_some(series)?;
            theirs?.over(ours, bytes)
        })
    }

    /// What a backend of ours takes over its library without us.
    fn over_bare(&self, series: &Series, bytes: usize) -> Option<Estimate> {
        let bare = series.kind.bare()?;
        let alike = |other: &&Series| other.kind == bare && other.dtype == series.dtype;
        series.over(self.series.iter().find(alike)?, bytes)
    }

    /// What it takes over as many bytes of f32.
    fn over_f32(&self, series: &Series, bytes: usize) -> Option<Estimate> {
        let alike = |other: &&Series| {
            other.kind == series.kind
                && other.memory == series.memory
                && other.dtype == Dtype::F32
                && series.dtype != Dtype::F32
        };
        series.over(self.series.iter().find(alike)?, bytes)
    }

    /// How far apart the processors were: median, least, most.
    fn distance_ns(&self) -> Option<[f64; 3]> {
        let all = self.distances_ns.iter().copied();
        let (least, most) = (all.clone().reduce(f64::min)?, all.reduce(f64::max)?);
        Some([median(&self.distances_ns), least, most])
    }

    /// Contestants without the roof, which is a figure of theirs.
    pub(crate) fn contestants(&self) -> impl Iterator<Item = &Series> {
        self.series
            .iter()
            .filter(|series| series.kind != Kind::Roof)
    }

    /// Whether anybody but the roof was measured.
    pub(crate) fn has_figures(&self) -> bool {
        self.contestants().any(|series| !series.cells.is_empty())
    }

    /// What makes the run fail. A competitor that is not there does not.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if !self.has_figures() {
            problems.push(format!("nothing of {}", count_ranks(self.ranks)));
        }
        for series in &self.series {
            let of_own = series
                .missing
                .clone()
                .filter(|_| matches!(series.kind, Kind::Own(_)));
            let wrong = self.sizes.iter().filter_map(|&bytes| series.problem(bytes));
            for problem in wrong.chain(of_own).chain(series.failed.clone()) {
                let ranks = count_ranks(self.ranks);
                problems.push(format!("{} of {ranks}: {problem}", series.label()));
            }
        }
        problems
    }

    pub(crate) fn json_lines(&self) -> Vec<Value> {
        let mut lines = Vec::new();
        for series in self.contestants() {
            for &bytes in &self.sizes {
                if series.p50_us(bytes).is_some() {
                    lines.push(self.json(series, bytes));
                }
            }
            let reason = [("missing", &series.missing), ("failed", &series.failed)];
            for (name, reason) in reason {
                if let Some(reason) = reason {
                    let mut line = self.json_head(series);
                    line.insert(name.into(), json!(reason));
                    lines.push(Value::Object(line));
                }
            }
        }
        lines
    }

    fn json_head(&self, series: &Series) -> Map<String, Value> {
        let mut line = Map::new();
        line.insert("bench".into(), json!("allreduce"));
        line.insert("backend".into(), json!(series.kind.name()));
        line.insert("ranks".into(), json!(self.ranks));
        line.insert("dtype".into(), json!(series.dtype.name()));
        line.insert(
            "registered".into(),
            json!(series.memory == Memory::Registered),
        );
        line.insert("pinned".into(), json!(self.pinned));
        line.insert("between_hosts".into(), json!(self.hosts.is_some()));
        line.insert("hosts".into(), json!(self.hosts.unwrap_or(1)));
        if let Some([median, least, most]) = self.distance_ns() {
            line.insert("round_trip_ns".into(), json!(median));
            line.insert("round_trip_ns_range".into(), json!([least, most]));
        }
        line
    }

    fn json(&self, series: &Series, bytes: usize) -> Value {
        let cell = &series.cells[&bytes];
        let mut line = self.json_head(series);
        let mut put = |name: &str, value: Value| line.insert(name.into(), value);
        put("bytes", json!(bytes));
        put("p50_us", json!(median(&cell.p50_us)));
        put(
            "min_us",
            json!(cell.min_us.iter().copied().fold(f64::INFINITY, f64::min)),
        );
        put("iters", json!(cell.iters));
        put("rounds", json!(cell.p50_us.len()));
        let roof = self.roof(bytes).and_then(|roof| roof.p50_us(bytes));
        put("roof_us", json!(roof));
        put("time_over_roof", json!(self.over_roof(series, bytes)));
        put("verified", json!(cell.wrong == 0));
        for (name, ratio) in ["gloo", "mpi"].iter().zip(self.ratios(series, bytes)) {
            if let Some(Estimate { median, interval }) = ratio {
                put(&format!("speedup_over_{name}"), json!(median));
                put(&format!("speedup_over_{name}_95"), json!(interval));
            }
        }
        let others = [
            ("bare", self.over_bare(series, bytes)),
            ("f32", self.over_f32(series, bytes)),
        ];
        for (name, ratio) in others {
            if let Some(Estimate { median, interval }) = ratio {
                put(&format!("time_over_{name}"), json!(median));
                put(&format!("time_over_{name}_95"), json!(interval));
            }
        }
        Value::Object(line)
    }

    /// Rows of the table, by size; ratios are what competitors take divided by what ours takes.
    pub(crate) fn table(&self) -> Vec<String> {
        let place = match (self.hosts, self.pinned) {
            (Some(hosts), _) => format!("on {hosts} hosts"),
            (None, true) => "pinned".to_owned(),
            (None, false) => "more than processors".to_owned(),
        };
        let ranks = count_ranks(self.ranks);
        let mut head = format!("{ranks} ({place}), sum of {}", self.dtypes());
        if let Some([median, least, most]) = self.distance_ns() {
            head += &format!(
                "; from one processor to another and back a word takes {median:.0} ns \
                 ({least:.0} to {most:.0})"
            );
        }
        let mut rows = vec![
            head,
            row([
                "bytes",
                "backend",
                "p50_us",
                "min_us",
                "gloo/ours",
                "mpi/ours",
                "time/roof",
            ]),
            "|--:|---|--:|--:|--:|--:|--:|".to_owned(),
        ];
        for &bytes in &self.sizes {
            for series in self.contestants() {
                let Some(p50) = series.p50_us(bytes) else {
                    continue;
                };
                let min = series.cells[&bytes]
                    .min_us
                    .iter()
                    .copied()
                    .fold(f64::INFINITY, f64::min);
                let median = |ratio: Option<Estimate>| show(ratio.map(|ratio| ratio.median));
                let [gloo, mpi] = self.ratios(series, bytes).map(median);
                let over_roof = self.over_roof(series, bytes);
                rows.push(row([
                    &bytes.to_string(),
                    &series.label(),
                    &show(Some(p50)),
                    &show(Some(min)),
                    &gloo,
                    &mpi,
                    &show(over_roof),
                ]));
            }
        }
        for series in self.contestants() {
            for &bytes in &self.sizes {
                let others = [
                    ("its library takes for", self.over_bare(series, bytes)),
                    ("f32 takes for as many as", self.over_f32(series, bytes)),
                ];
                for (what, ratio) in others {
                    let Some(Estimate { median, interval }) = ratio else {
                        continue;
                    };
                    let interval = interval.map_or_else(String::new, |[low, high]| {
                        format!(" (95 %: {low:.3} to {high:.3})")
                    });
                    rows.push(format!(
                        "{} takes {median:.3} times what {what} {bytes} bytes{interval}",
                        series.label()
                    ));
                }
            }
        }
        for series in self.contestants() {
            if let Some(reason) = &series.missing {
                rows.push(format!("{} is missing: {reason}", series.label()));
            }
        }
        rows.extend(
            self.problems()
                .into_iter()
                .map(|problem| format!("FAILED: {problem}")),
        );
        rows.push(String::new());
        rows
    }
}

fn row([bytes, backend, p50, min, gloo, mpi, roof]: [&str; 7]) -> String {
    format!(
        "| {bytes:>10} | {backend:<19} | {p50:>10} | {min:>10} | {gloo:>9} | {mpi:>9} | {roof:>9} |"
    )
}

pub(crate) fn count_ranks(ranks: usize) -> String {
    let plural = if ranks == 1 { "" } else { "s" };
    format!("{ranks} rank{plural}")
}

fn show(value: Option<f64>) -> String {
    match value {
        None => "-".into(),
        Some(v) if v >= 100.0 => format!("{v:.0}"),
        Some(v) => format!("{v:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(kind: Kind, memory: Memory, p50s: &[f64]) -> Series {
        let mut series = Series::new(kind, memory, Dtype::F32, 0, None);
        let window = Window::new(1 << 20, Dtype::F32, memory, false);
        p50s.iter()
            .for_each(|&p50| series.record(&window, p50, p50 / 2.0, 0));
        series
    }

    fn comparison(series: Vec<Series>) -> Comparison {
        Comparison {
            ranks: 2,
            pinned: true,
            hosts: None,
            sizes: vec![1 << 20],
            series,
            distances_ns: vec![530.0, 104.0, 98.0],
        }
    }

    fn native(p50s: &[f64]) -> Series {
        series(Kind::Own("native".into()), Memory::Registered, p50s)
    }

    #[test]
    fn ours_carries_the_ratios_and_mpi_is_the_better_one() {
        let all = comparison(vec![
            native(&[10.0, 90.0, 12.0]),
            series(Kind::TorchGloo, Memory::Plain, &[100.0, 900.0, 120.0]),
            series(Kind::OpenMpi, Memory::Plain, &[36.0, 36.0, 36.0]),
            // In one state of the machine everybody is slower: what counts is that it is twice as slow.
            series(Kind::IntelMpi, Memory::Plain, &[20.0, 180.0, 24.0]),
            series(Kind::Roof, Memory::Plain, &[8.0, 60.0, 8.0]),
        ]);
        let lines = all.json_lines();
        assert_eq!(lines.len(), 4);
        assert_eq!(lines[0]["p50_us"], 12.0);
        assert_eq!(lines[0]["min_us"], 5.0);
        assert_eq!(lines[0]["roof_us"], 8.0);
        assert_eq!(lines[0]["time_over_roof"], 1.5);
        assert_eq!(lines[0]["registered"], true);
        assert_eq!(lines[0]["round_trip_ns"], 104.0);
        assert_eq!(lines[0]["round_trip_ns_range"], json!([98.0, 530.0]));
        assert_eq!(lines[0]["speedup_over_gloo"], 10.0);
        assert_eq!(lines[0]["speedup_over_mpi"], 2.0);
        assert!(lines[2].get("speedup_over_mpi").is_none());
        let row = &all.table()[3];
        assert!(
            row.contains("10.00") && row.contains("2.00") && row.contains("1.50"),
            "{row}"
        );
    }

    #[test]
    fn types_are_compared_with_f32_and_with_others_of_their_own() {
        let bf16 = |series: Series| Series {
            dtype: Dtype::Bf16,
            ..series
        };
        let all = comparison(vec![
            native(&[10.0, 90.0, 12.0]),
            bf16(native(&[15.0, 135.0, 18.0])),
            series(Kind::OpenMpi, Memory::Plain, &[30.0, 270.0, 36.0]),
            bf16(series(Kind::TorchGloo, Memory::Plain, &[60.0, 540.0, 72.0])),
        ]);
        let lines = all.json_lines();
        assert_eq!(lines[1]["dtype"], "bf16");
        assert_eq!(lines[1]["time_over_f32"], 1.5);
        assert!(lines[1]["time_over_f32_95"].is_null(), "three rounds");
        assert_eq!(lines[1]["speedup_over_gloo"], 4.0);
        assert!(lines[1].get("speedup_over_mpi").is_none());
        assert_eq!(lines[0]["speedup_over_mpi"], 3.0);
        assert!(lines[0].get("speedup_over_gloo").is_none());
        assert!(lines[0].get("time_over_f32").is_none());
        let table = all.table();
        assert!(table[0].contains("sum of f32 and bf16"), "{}", table[0]);
        let compared = table.iter().find(|row| row.contains("f32 takes"));
        let compared = compared.expect("a row compares the types");
        assert!(
            compared.starts_with("native (bf16) takes 1.500 times"),
            "{compared}"
        );
    }

    #[test]
    fn who_is_missing_is_named_with_the_reason_and_fails_nothing() {
        let missing = Some("no mpicc".to_owned());
        let all = comparison(vec![
            native(&[1.0]),
            Series::new(Kind::OpenMpi, Memory::Plain, Dtype::F32, 1, missing),
        ]);
        let line = &all.json_lines()[1];
        assert_eq!(line["backend"], "openmpi");
        assert_eq!(line["missing"], "no mpicc");
        assert!(line.get("verified").is_none());
        assert!(
            all.table()
                .contains(&"openmpi is missing: no mpicc".to_owned())
        );
        assert!(all.problems().is_empty());
    }

    #[test]
    fn measuring_nothing_fails_the_run() {
        let missing = Some("no mpicc".to_owned());
        let all = comparison(vec![
            Series::new(Kind::OpenMpi, Memory::Plain, Dtype::F32, 0, missing),
            series(Kind::Roof, Memory::Plain, &[1.0]),
        ]);
        assert_eq!(all.problems(), ["nothing of 2 ranks"]);
    }

    #[test]
    fn wrong_sums_and_failures_fail_the_run() {
        let mut wrong = native(&[1.0]);
        wrong.record(
            &Window::new(1 << 20, Dtype::F32, Memory::Registered, false),
            1.0,
            1.0,
            3,
        );
        let mut failed = series(Kind::TorchGloo, Memory::Plain, &[1.0]);
        failed.failed = Some("rank 1: gone".into());
        let all = comparison(vec![wrong, failed]);
        assert_eq!(all.json_lines()[0]["verified"], false);
        assert_eq!(all.problems().len(), 2, "{:?}", all.problems());
    }
}
