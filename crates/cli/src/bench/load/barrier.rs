//! Barriers of clients that stay connected.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use phalanx_store::tcp::wire::{READY, Request};

use super::net::{Poller, connect_all, receive, send};
use super::pairs::PATIENCE;
use super::{BarrierForm, Sample, Task};
use crate::Failure;
use crate::bench::cpu;
use crate::bench::stats::percentile;

const MIN_ROUNDS: usize = 3;
const MAX_ROUNDS: usize = 1_000;
/// How long the rehearsal looks for clients that are let go too early.
const LOOKOUT: Duration = Duration::from_millis(20);

pub(super) fn run(task: &Task, conns: usize, form: BarrierForm) -> Result<Sample, Failure> {
    let mut hall = Hall::new(task, conns, form)?;
    hall.meet(task, 0, true)?;
    let cpu = cpu::used_by(task.server_pid)?;
    let begin = Instant::now();
    let mut rounds = Vec::new();
    while rounds.len() < MAX_ROUNDS
        && (rounds.len() < MIN_ROUNDS || begin.elapsed() < task.window())
    {
        let start = Instant::now();
        hall.meet(task, rounds.len() + 1, false)?;
        rounds.push(start.elapsed().as_nanos() as u64);
    }
    let cpu = cpu::used_by(task.server_pid)? - cpu;

    rounds.sort_unstable();
    let mut sample = Sample::default();
    sample.note("p50_ms", percentile(&rounds, 0.5) as f64 / 1e6);
    sample.note("p95_ms", percentile(&rounds, 0.95) as f64 / 1e6);
    if !cpu.is_zero() {
        let per_round = cpu.as_secs_f64() * 1e3 / rounds.len() as f64;
        sample.note("server_cpu_ms_per_round", per_round);
    }
    Ok(sample)
}

/// All clients.
struct Hall {
    form: BarrierForm,
    poller: Poller,
    guests: Vec<Guest>,
}

struct Guest {
    socket: TcpStream,
    state: GuestState,
    answer: [u8; 8],
    have: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum GuestState {
    /// Has asked for the count.
    Counting,
    /// Is to be sent one byte when all are there.
    Waiting,
    Released,
}

impl Hall {
    fn new(task: &Task, conns: usize, form: BarrierForm) -> Result<Self, Failure> {
        let poller = Poller::new(256)?;
        let mut guests = Vec::with_capacity(conns);
        for (number, socket) in connect_all(task.server, conns)?.into_iter().enumerate() {
            poller.add(&socket, number)?;
            guests.push(Guest {
                socket,
                state: GuestState::Released,
                answer: [0; 8],
                have: 0,
            });
        }
        Ok(Self {
            form,
            poller,
            guests,
        })
    }

    /// One barrier. In a rehearsal the last client comes late, and nobody may pass before it.
    fn meet(&mut self, task: &Task, round: usize, rehearsal: bool) -> Result<(), Failure> {
        let conns = self.guests.len();
        let count_key = task.fresh_key(round);
        let done_key = [&count_key[..], b"/done"].concat();
        let mut arrival = Vec::new();
        match self.form {
            BarrierForm::Add => Request::Add {
                key: &count_key,
                delta: 1,
            },
            BarrierForm::Opcode => Request::Barrier {
                key: &count_key,
                world_size: conns as i64,
            },
        }
        .encode(&mut arrival);
        let mut done = Vec::new();
        Request::Set {
            key: &done_key,
            value: b"1",
        }
        .encode(&mut done);
        let mut wait = Vec::new();
        let keys = &[done_key];
        Request::Wait { keys }.encode(&mut wait);

        let mut left = conns;
        let mut counted = vec![false; conns];
        let mut last_is_missing = rehearsal;
        let mut sent = 0;
        loop {
            let present = conns - usize::from(last_is_missing);
            for guest in &mut self.guests[sent..present] {
                guest.arrive(self.form, &arrival)?;
            }
            sent = present;
            let patience = if last_is_missing { LOOKOUT } else { PATIENCE };
            let mut idle = true;
            for number in self.poller.wait(patience)? {
                idle = false;
                let guest = &mut self.guests[number];
                match guest.listen()? {
                    None => {}
                    Some(Heard::Count(count)) => {
                        let place = usize::try_from(count - 1).ok().filter(|&n| n < conns);
                        let place = place.ok_or_else(|| format!("ADD gave {count}"))?;
                        if std::mem::replace(&mut counted[place], true) {
                            return Err(format!("ADD gave {count} twice").into());
                        }
                        if place + 1 == conns {
                            done.extend_from_slice(&wait);
                            send(&guest.socket, &done)?;
                        } else {
                            send(&guest.socket, &wait)?;
                        }
                    }
                    Some(Heard::Release) if last_is_missing => {
                        return Err("a client passed the barrier before the last one came".into());
                    }
                    Some(Heard::Release) => left -= 1,
                }
            }
            if left == 0 {
                return Ok(());
            }
            if idle && !std::mem::take(&mut last_is_missing) {
                return Err(format!("{left} clients hang in the barrier for {PATIENCE:?}").into());
            }
        }
    }
}

enum Heard {
    Count(i64),
    Release,
}

impl Guest {
    fn arrive(&mut self, form: BarrierForm, arrival: &[u8]) -> Result<(), Failure> {
        send(&self.socket, arrival)?;
        self.have = 0;
        self.state = match form {
            BarrierForm::Add => GuestState::Counting,
            BarrierForm::Opcode => GuestState::Waiting,
        };
        Ok(())
    }

    fn listen(&mut self) -> Result<Option<Heard>, Failure> {
        let len = match self.state {
            GuestState::Counting => 8,
            GuestState::Waiting => 1,
            GuestState::Released => return Err("an answer nobody asked for".into()),
        };
        if !receive(&self.socket, &mut self.answer[..len], &mut self.have)? {
            return Ok(None);
        }
        self.have = 0;
        if self.state == GuestState::Counting {
            self.state = GuestState::Waiting;
            return Ok(Some(Heard::Count(i64::from_le_bytes(self.answer))));
        }
        self.state = GuestState::Released;
        match self.answer[0] {
            READY => Ok(Some(Heard::Release)),
            other => Err(format!("a barrier was answered with {other}").into()),
        }
    }
}
