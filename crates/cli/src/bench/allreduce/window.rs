//! What ranks are told and what they answer: lines of text, so that programs in other languages
//! speak it too.
//!
//! A rank connects to the bench's socket, says `hello RANK NAME-AND-VERSION`, and then answers
//! each window (`run BYTES DTYPE MEMORY ITERS WARMUP BARRIER BATCH`) with `done WRONG
//! NANOSECONDS...`, or anything with `fail TEXT`. It leaves when the socket is closed.

use std::time::Duration;

use crate::Failure;

/// Where a rank's data lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Memory {
    /// From the group's `allocate`.
    Registered,
    /// From the heap.
    Plain,
}

/// What is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Dtype {
    F32,
    Bf16,
}

impl Dtype {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

/// A number of operations of one kind, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) bytes: usize,
    pub(crate) dtype: Dtype,
    pub(crate) memory: Memory,
    /// Operations that count.
    pub(crate) iters: usize,
    /// Operations before them.
    pub(crate) warmup: usize,
    /// Whether ranks meet between refilling and starting.
    pub(crate) barrier: bool,
    /// Operations between two looks at the clock; `iters` and `warmup` are multiples of it. A time
    /// is a batch's, divided by this.
    pub(crate) batch: usize,
}

/// From here on ranks meet in a barrier (the contestant's own) after they have refilled. The time
/// would otherwise contain the others' refilling, which takes longer than the operation when ranks
/// share processors; when they do not, two of them differed by a third of an operation of 64 KiB.
/// Below, a barrier is itself about as long as the operation.
const BARRIER_FROM_BYTES: usize = 64 << 10;

impl Window {
    /// The same for every contestant. `crowded`: there are more ranks than processors.
    pub(crate) fn new(bytes: usize, dtype: Dtype, memory: Memory, crowded: bool) -> Self {
        let iters = match bytes {
            0..=4096 => 2000,
            4097..=262_144 => 400,
            262_145..=4_194_304 => 80,
            4_194_305..=33_554_432 => 16,
            _ => 8,
        };
        let iters = if crowded { (iters / 4).max(5) } else { iters };
        // An operation of a few hundred nanoseconds is too short for a clock that ticks every ten
        // and takes thirty to read.
        let batch = if bytes <= 4096 { 10 } else { 1 };
        Self {
            bytes,
            dtype,
            memory,
            iters,
            warmup: (iters / 10).max(3),
            barrier: bytes >= BARRIER_FROM_BYTES,
            batch,
        }
    }
}

/// An asynchronous all-reduce, something else meanwhile, and how long waiting then takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Overlap {
    pub(crate) bytes: usize,
    pub(crate) memory: Memory,
    pub(crate) iters: usize,
    pub(crate) sleep: Duration,
}

/// What a rank is told to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    Run(Window),
    Overlap(Overlap),
}

impl Memory {
    fn name(self) -> &'static str {
        match self {
            Self::Registered => "registered",
            Self::Plain => "plain",
        }
    }
}

impl std::fmt::Display for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Run(w) => {
                let (dtype, memory, barrier) = (w.dtype.name(), w.memory.name(), w.barrier as u8);
                let (bytes, iters, warmup, batch) = (w.bytes, w.iters, w.warmup, w.batch);
                write!(
                    f,
                    "run {bytes} {dtype} {memory} {iters} {warmup} {barrier} {batch}"
                )
            }
            Self::Overlap(o) => {
                let (memory, sleep) = (o.memory.name(), o.sleep.as_nanos());
                write!(f, "overlap {} {memory} {} {sleep}", o.bytes, o.iters)
            }
        }
    }
}

impl std::str::FromStr for Task {
    type Err = Failure;

    fn from_str(line: &str) -> Result<Self, Failure> {
        let unknown = || format!("not a task: {line:?}");
        let memory = |name| match name {
            "registered" => Ok(Memory::Registered),
            "plain" => Ok(Memory::Plain),
            _ => Err(unknown()),
        };
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["run", bytes, dtype, place, iters, warmup, barrier, batch] => Ok(Self::Run(Window {
                bytes: bytes.parse()?,
                dtype: clap::ValueEnum::from_str(dtype, false)?,
                memory: memory(place)?,
                iters: iters.parse()?,
                warmup: warmup.parse()?,
                barrier: barrier == "1",
                batch: batch.parse()?,
            })),
            ["overlap", bytes, place, iters, sleep] => Ok(Self::Overlap(Overlap {
                bytes: bytes.parse()?,
                memory: memory(place)?,
                iters: iters.parse()?,
                sleep: Duration::from_nanos(sleep.parse()?),
            })),
            _ => Err(unknown().into()),
        }
    }
}

/// A rank's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Elements that were not what they should be.
    pub(crate) wrong: u64,
    /// How long operations took, by batch.
    pub(crate) nanos: Vec<u64>,
}

impl std::fmt::Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "done {}", self.wrong)?;
        self.nanos
            .iter()
            .try_for_each(|nanos| write!(f, " {nanos}"))
    }
}

impl std::str::FromStr for Answer {
    type Err = Failure;

    fn from_str(line: &str) -> Result<Self, Failure> {
        let line = line.trim_end();
        if let Some(text) = line.strip_prefix("fail ") {
            return Err(text.into());
        }
        let rest = line
            .strip_prefix("done ")
            .ok_or("it left without an answer")?;
        let numbers: Result<Vec<u64>, _> = rest.split(' ').map(str::parse).collect();
        match numbers?.split_first() {
            Some((&wrong, nanos)) if !nanos.is_empty() => Ok(Self {
                wrong,
                nanos: nanos.to_vec(),
            }),
            _ => Err("it answered without times".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_and_answers_survive_the_wire() {
        for task in [
            Task::Run(Window::new(1 << 20, Dtype::Bf16, Memory::Registered, false)),
            Task::Run(Window::new(4, Dtype::F32, Memory::Plain, true)),
            Task::Overlap(Overlap {
                bytes: 25 << 20,
                memory: Memory::Registered,
                iters: 7,
                sleep: Duration::from_micros(1234),
            }),
        ] {
            assert_eq!(task.to_string().parse::<Task>().unwrap(), task);
        }
        let answer = Answer {
            wrong: 3,
            nanos: vec![1, 20],
        };
        assert_eq!(format!("{answer}\n").parse::<Answer>().unwrap(), answer);
    }

    #[test]
    fn a_rank_that_fails_or_leaves_is_an_error() {
        let error = |line: &str| line.parse::<Answer>().unwrap_err().to_string();
        assert_eq!(error("fail out of memory\n"), "out of memory");
        assert!(error("").contains("left"));
        assert!(error("done 0\n").contains("times"));
        assert!("run 4 f32".parse::<Task>().is_err());
    }
}
