//! Closed loop of set+get pairs: each client has one pair in flight.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use phalanx_store::tcp::wire::{READY, Request};
use serde::{Deserialize, Serialize};

use super::net::{Poller, connect_all, receive, send};
use super::{Sample, Task, micros};
use crate::Failure;
use crate::bench::cpu;
use crate::bench::stats::percentile;

pub(crate) const VALUE_LEN: usize = 64;
/// The answer to `GET`: a length and the value.
pub(crate) const ANSWER_LEN: usize = 8 + VALUE_LEN;
/// How long a server may owe an answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// How a pair crosses the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub(crate) enum Pattern {
    /// As PyTorch's client does: `SET`, `WAIT`, a byte back, `GET`, the value back.
    Torch,
    /// `SET` and `GET` in one piece, the value back.
    Pipelined,
}

/// The bytes of one client's requests.
pub(crate) struct Requests {
    pub(crate) set: Vec<u8>,
    pub(crate) wait: Vec<u8>,
    pub(crate) get: Vec<u8>,
}

impl Requests {
    /// All clients' requests have the same lengths.
    pub(crate) fn new(client: usize) -> Self {
        let key = format!("/bench/key{client:06}").into_bytes();
        let (mut set, mut wait, mut get) = (Vec::new(), Vec::new(), Vec::new());
        let value = &[b'v'; VALUE_LEN];
        Request::Set { key: &key, value }.encode(&mut set);
        Request::Get { key: &key }.encode(&mut get);
        let keys = &[key];
        Request::Wait { keys }.encode(&mut wait);
        Self { set, wait, get }
    }
}

/// A client, and where it is in its pair.
pub(super) struct PairClient {
    pub(super) socket: TcpStream,
    pattern: Pattern,
    requests: Requests,
    /// Counts pairs, and is part of every value, unless values are fixed.
    sequence: Option<u64>,
    /// `WAIT` was asked and `GET` was not yet.
    waiting: bool,
    answer: [u8; ANSWER_LEN],
    have: usize,
}

impl PairClient {
    pub(super) fn new(number: usize, socket: TcpStream, pattern: Pattern, fixed: bool) -> Self {
        Self {
            socket,
            pattern,
            requests: Requests::new(number),
            sequence: (!fixed).then_some((number as u64) << 40),
            waiting: false,
            answer: [0; ANSWER_LEN],
            have: 0,
        }
    }

    fn value(&self) -> &[u8] {
        &self.requests.set[self.requests.set.len() - VALUE_LEN..]
    }

    /// Sends the next pair.
    pub(super) fn start(&mut self) -> Result<(), Failure> {
        if let Some(sequence) = &mut self.sequence {
            *sequence += 1;
            let at = self.requests.set.len() - VALUE_LEN;
            self.requests.set[at..at + 8].copy_from_slice(&sequence.to_le_bytes());
        }
        match self.pattern {
            Pattern::Torch => {
                send(&self.socket, &self.requests.set)?;
                send(&self.socket, &self.requests.wait)?;
                self.waiting = true;
            }
            Pattern::Pipelined => {
                let set_len = self.requests.set.len();
                self.requests.set.extend_from_slice(&self.requests.get);
                let sent = send(&self.socket, &self.requests.set);
                self.requests.set.truncate(set_len);
                sent?;
            }
        }
        Ok(())
    }

    /// Takes what has arrived; true when the pair is complete and its value is the one stored.
    pub(super) fn advance(&mut self) -> Result<bool, Failure> {
        if self.waiting {
            if receive(&self.socket, &mut self.answer[..1], &mut self.have)? {
                if self.answer[0] != READY {
                    return Err(format!("WAIT was answered with {}", self.answer[0]).into());
                }
                self.have = 0;
                self.waiting = false;
                send(&self.socket, &self.requests.get)?;
            }
            return Ok(false);
        }
        if !receive(&self.socket, &mut self.answer, &mut self.have)? {
            return Ok(false);
        }
        self.have = 0;
        let (len, value) = self.answer.split_at(8);
        if len != (VALUE_LEN as u64).to_le_bytes() || value != self.value() {
            return Err("GET gave another value than the one stored".into());
        }
        Ok(true)
    }
}

pub(super) fn run(
    task: &Task,
    conns: usize,
    pattern: Pattern,
    fixed: bool,
) -> Result<Sample, Failure> {
    let mut poller = Poller::new(256)?;
    let mut clients = Vec::with_capacity(conns);
    for (number, socket) in connect_all(task.server, conns)?.into_iter().enumerate() {
        poller.add(&socket, number)?;
        clients.push(PairClient::new(number, socket, pattern, fixed));
    }
    let mut starts = vec![Instant::now(); conns];
    for (client, start) in clients.iter_mut().zip(&mut starts) {
        *start = Instant::now();
        client.start()?;
    }
    let mut latencies = Vec::new();
    let mut cycle = |window: Duration, latencies: &mut Vec<u64>| -> Result<Duration, Failure> {
        let begin = Instant::now();
        let mut now = begin;
        while now - begin < window {
            let mut idle = true;
            for number in poller.wait(PATIENCE)? {
                idle = false;
                if clients[number].advance()? {
                    now = Instant::now();
                    latencies.push((now - starts[number]).as_nanos() as u64);
                    starts[number] = now;
                    clients[number].start()?;
                }
            }
            if idle {
                return Err(format!("no answer for {PATIENCE:?}").into());
            }
        }
        Ok(now - begin)
    };
    // Caches, branch predictors and the table's memory are warm before the window begins.
    cycle(task.window() / 10, &mut latencies)?;
    latencies.clear();
    let cpu = cpu::used_by(task.server_pid)?;
    let elapsed = cycle(task.window(), &mut latencies)?;
    let cpu = cpu::used_by(task.server_pid)? - cpu;

    let pairs = latencies.len() as f64;
    latencies.sort_unstable();
    let mut sample = Sample::default();
    sample.note("pairs_per_s", pairs / elapsed.as_secs_f64());
    // The kernel accounts a running thread only now and then: a short window may show nothing.
    if !cpu.is_zero() {
        sample.note("pairs_per_server_cpu_s", pairs / cpu.as_secs_f64());
    }
    sample.note("p50_us", micros(percentile(&latencies, 0.5)));
    sample.note("p99_us", micros(percentile(&latencies, 0.99)));
    Ok(sample)
}
