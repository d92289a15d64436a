//! SLURM's compressed lists: `gpu[01-03,7],login1` and `2(x3),1`.

use std::fmt::Write as _;

/// Why a list could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BadList(pub(super) String);

/// A node list, kept compressed: `n[1-99999999999]` costs as much memory as its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodeList {
    /// Not empty.
    patterns: Vec<Pattern>,
}

/// One entry of the list: its parts in order, at least one.
type Pattern = Vec<Part>;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    /// `[1-3,7]`; not empty.
    Ranges(Vec<Range>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Range {
    low: u64,
    high: u64,
    /// Digits to pad to with zeros, as the lower bound was written.
    width: usize,
}

impl NodeList {
    pub(super) fn parse(list: &str) -> Result<Self, BadList> {
        let patterns = split_outside_brackets(list)?
            .into_iter()
            .map(parse_pattern)
            .collect::<Result<_, _>>()?;
        Ok(Self { patterns })
    }

    /// The first host, where SLURM puts rank 0.
    pub(super) fn first(&self) -> String {
        let mut name = String::new();
        for part in &self.patterns[0] {
            match part {
                Part::Text(text) => name.push_str(text),
                Part::Ranges(ranges) => ranges[0].write(ranges[0].low, &mut name),
            }
        }
        name
    }
}

impl Range {
    fn write(&self, value: u64, name: &mut String) {
        let width = self.width;
        let _ = write!(name, "{value:0width$}");
    }
}

/// The entries of a list, cut at the commas that are not between brackets.
fn split_outside_brackets(list: &str) -> Result<Vec<&str>, BadList> {
    let (mut entries, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, c) in list.char_indices() {
        match (c, inside) {
            ('[', false) => inside = true,
            (']', true) => inside = false,
            ('[', true) => return Err(BadList("a bracket inside a bracket".into())),
            (']', false) => return Err(BadList("a closing bracket without an opening one".into())),
            (',', false) => {
                entries.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err(BadList("a bracket that is not closed".into()));
    }
    entries.push(&list[start..]);
    Ok(entries)
}

/// `rack[1-2]node[3,5]`: brackets are known to be balanced and not nested.
fn parse_pattern(entry: &str) -> Result<Pattern, BadList> {
    let mut parts = Pattern::new();
    for piece in entry.split_inclusive(']') {
        let (text, ranges) = match piece.strip_suffix(']') {
            Some(piece) => piece.split_once('[').unwrap_or((piece, "")),
            None => (piece, ""),
        };
        if let Some(bad) = text.chars().find(|c| !is_host_character(*c)) {
            return Err(BadList(format!("a host name with the character {bad:?}")));
        }
        if !text.is_empty() {
            parts.push(Part::Text(text.to_owned()));
        }
        if piece.ends_with(']') {
            let ranges = ranges
                .split(',')
                .map(parse_range)
                .collect::<Result<_, _>>()?;
            parts.push(Part::Ranges(ranges));
        }
    }
    if parts.is_empty() {
        return Err(BadList("an empty entry".into()));
    }
    Ok(parts)
}

fn is_host_character(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')
}

/// `7` or `01-16`.
fn parse_range(text: &str) -> Result<Range, BadList> {
    let (low, high) = text.split_once('-').unwrap_or((text, text));
    let number = |digits: &str| {
        let digits_only = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        let value = digits_only.then(|| digits.parse().ok()).flatten();
        value.ok_or_else(|| BadList(format!("{digits:?} where a number is expected")))
    };
    let range = Range {
        low: number(low)?,
        high: number(high)?,
        width: low.len(),
    };
    if range.low > range.high {
        return Err(BadList(format!("the range {text:?} that runs backwards")));
    }
    Ok(range)
}

/// How many tasks run on node `index`, from a list such as `2(x3),1`.
///
/// Repetitions are skipped, not expanded. `None` if the list is shorter.
pub(super) fn tasks_on_node(list: &str, index: usize) -> Result<Option<usize>, BadList> {
    let mut nodes_left = index;
    let mut found = None;
    for entry in list.split(',') {
        let (tasks, nodes) = match entry.strip_suffix(')').and_then(|e| e.split_once("(x")) {
            Some((tasks, nodes)) => (tasks, nodes),
            None => (entry, "1"),
        };
        let number = |text: &str| {
            let bad = || BadList(format!("{entry:?} where a number of tasks is expected"));
            text.parse::<usize>().map_err(|_| bad())
        };
        let (tasks, nodes) = (number(tasks)?, number(nodes)?);
        if found.is_none() && nodes_left < nodes {
            found = Some(tasks);
        }
        nodes_left = nodes_left.saturating_sub(nodes);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    impl NodeList {
        /// Every host, for comparison; only for lists known to be short.
        fn expand(&self) -> Vec<String> {
            self.patterns.iter().flat_map(|p| expand(p)).collect()
        }
    }

    fn expand(parts: &[Part]) -> Vec<String> {
        let Some((part, rest)) = parts.split_first() else {
            return vec![String::new()];
        };
        let heads: Vec<String> = match part {
            Part::Text(text) => vec![text.clone()],
            Part::Ranges(ranges) => ranges
                .iter()
                .flat_map(|range| (range.low..=range.high).map(move |value| (range, value)))
                .map(|(range, value)| {
                    let mut name = String::new();
                    range.write(value, &mut name);
                    name
                })
                .collect(),
        };
        let tails = expand(rest);
        heads
            .iter()
            .flat_map(|head| tails.iter().map(move |tail| format!("{head}{tail}")))
            .collect()
    }

    #[test]
    fn lists_as_slurm_writes_them() {
        for (list, hosts) in [
            ("gpu1", "gpu1"),
            ("gpu-a[01-02]", "gpu-a01 gpu-a02"),
            ("n[8-11]", "n8 n9 n10 n11"),
            ("n[08-11]", "n08 n09 n10 n11"),
            ("n[1-2,5],login.example.org", "n1 n2 n5 login.example.org"),
            ("rack[1-2]n[3,4]", "rack1n3 rack1n4 rack2n3 rack2n4"),
            ("r[1-2]-ib", "r1-ib r2-ib"),
            ("[1-2]", "1 2"),
        ] {
            let parsed = NodeList::parse(list).unwrap();
            assert_eq!(parsed.expand().join(" "), hosts, "{list}");
            assert_eq!(parsed.first(), parsed.expand()[0], "{list}");
        }
    }

    #[test]
    fn bad_lists_are_refused_with_the_reason() {
        for (list, reason) in [
            ("", "empty entry"),
            ("a,,b", "empty entry"),
            ("n[1-2", "not closed"),
            ("n1-2]", "without an opening"),
            ("n[[1]]", "inside a bracket"),
            ("n[]", "where a number"),
            ("n[2-1]", "backwards"),
            ("n[1-x]", "\"x\""),
            ("n[+1]", "\"+1\""),
            ("n[1-99999999999999999999]", "99999999999999999999"),
            ("a b", "' '"),
            ("(null)", "'('"),
        ] {
            let BadList(message) = NodeList::parse(list).unwrap_err();
            assert!(message.contains(reason), "{list}: {message}");
        }
    }

    #[test]
    fn a_hostile_range_is_not_expanded() {
        let list = NodeList::parse("n[1-99999999999]m[0-18446744073709551615]").unwrap();
        assert_eq!(list.first(), "n1m0");
        assert_eq!(
            tasks_on_node("2(x18446744073709551615)", 10).unwrap(),
            Some(2)
        );
    }

    #[test]
    fn tasks_per_node_are_found_without_expanding() {
        for (list, expected) in [
            ("3,1", vec![Some(3), Some(1), None]),
            ("2(x3),1", vec![Some(2), Some(2), Some(2), Some(1), None]),
            ("4", vec![Some(4), None]),
        ] {
            for (index, tasks) in expected.into_iter().enumerate() {
                assert_eq!(
                    tasks_on_node(list, index).unwrap(),
                    tasks,
                    "{list} at {index}"
                );
            }
        }
        for list in ["", "x", "2(x", "2(y3)", "2(x3),", "-1"] {
            assert!(tasks_on_node(list, 0).is_err(), "{list}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(list in "[a-c0-9\\[\\],-]{0,40}") {
            if let Ok(parsed) = NodeList::parse(&list) {
                prop_assert!(!parsed.first().is_empty());
            }
            let _ = tasks_on_node(&list, 3);
        }

        #[test]
        fn compressed_numbers_expand_to_themselves(
            prefix in "[a-z][a-z-]{0,5}",
            starts in prop::collection::vec((0u64..5000, 0u64..5), 1..5),
            width in 1usize..6,
        ) {
            let ranges: Vec<String> = starts
                .iter()
                .map(|(low, more)| format!("{low:0width$}-{:0width$}", low + more))
                .collect();
            let hosts: Vec<String> = starts
                .iter()
                .flat_map(|(low, more)| *low..=low + more)
                .map(|value| format!("{prefix}{value:0width$}"))
                .collect();
            let list = NodeList::parse(&format!("{prefix}[{}]", ranges.join(","))).unwrap();
            prop_assert_eq!(list.expand(), hosts);
        }
    }
}
