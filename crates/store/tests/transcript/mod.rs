//! Reads the recordings under `data/`.

use std::path::Path;

/// One call and the bytes it caused.
pub(crate) struct Step {
    pub(crate) title: String,
    pub(crate) events: Vec<Event>,
}

pub(crate) struct Event {
    /// Which connection: `conn0` and so on, or `other` for a client that was not recorded.
    pub(crate) who: String,
    pub(crate) what: What,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum What {
    Open,
    Close,
    ToServer(Vec<u8>),
    ToClient(Vec<u8>),
}

/// The steps of a recording; bytes before the first title belong to a step without one.
pub(crate) fn read(name: &str) -> Vec<Step> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let text = std::fs::read_to_string(dir.join(name)).expect("the recording is committed");
    let mut steps = vec![Step {
        title: String::new(),
        events: Vec::new(),
    }];
    for line in text.lines() {
        if let Some(title) = line.strip_prefix("== ") {
            steps.push(Step {
                title: title.to_owned(),
                events: Vec::new(),
            });
        } else if let Some(event) = line.strip_prefix("  ") {
            let step = steps.last_mut().expect("there is always one");
            step.events.push(parse(event));
        }
    }
    steps
}

fn parse(line: &str) -> Event {
    let mut words = line.split_whitespace();
    let who = words.next().expect("a connection").to_owned();
    let what = match words.next() {
        Some("OPEN") => What::Open,
        Some("CLOSE") => What::Close,
        Some("C>S") => What::ToServer(words.flat_map(bytes).collect()),
        Some("S>C") => What::ToClient(words.flat_map(bytes).collect()),
        other => panic!("{other:?} in {line:?}"),
    };
    Event { who, what }
}

/// `2f`, or `78*5000` for many of the same.
fn bytes(word: &str) -> Vec<u8> {
    let (byte, count) = word.split_once('*').unwrap_or((word, "1"));
    let byte = u8::from_str_radix(byte, 16).expect("a byte in hexadecimal");
    vec![byte; count.parse().expect("a count")]
}
