//! Clients that arrive: connect, greet, and meet in a barrier if they are to.

use std::net::{SocketAddrV4, TcpStream};
use std::time::{Duration, Instant};

use phalanx_store::tcp::wire::{READY, Request};
use rustix::net::sockopt;

use super::net::{Poller, dial, greeting, receive, send};
use super::{Sample, Task};
use crate::bench::cpu;
use crate::{Failure, descriptors};

/// Descriptors that a process needs besides its clients.
const SPARE_DESCRIPTORS: usize = 64;
/// How long a crowd may take to come in.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// Raises the limit of open files; returns how many clients of `wanted` this process can have.
pub(super) fn affordable(wanted: usize) -> usize {
    wanted.min(descriptors::raise_limit().saturating_sub(SPARE_DESCRIPTORS))
}

/// Clients on their way in, known to a [`Poller`] by their place.
pub(super) struct Crowd {
    server: SocketAddrV4,
    members: Vec<Member>,
    /// What each says once it has been greeted; it is done when one byte comes back.
    request: Option<Vec<u8>>,
    pub(super) done: usize,
}

struct Member {
    socket: TcpStream,
    stage: Stage,
    answer: [u8; 4],
    have: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Connecting,
    Greeting,
    Asking,
    Done,
}

impl Crowd {
    pub(super) fn new(server: SocketAddrV4, request: Option<Vec<u8>>) -> Self {
        Self {
            server,
            members: Vec::new(),
            request,
            done: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Sends one more client on its way.
    pub(super) fn dial(&mut self, poller: &Poller) -> Result<(), Failure> {
        let socket = dial(self.server)?;
        poller.add_connecting(&socket, self.members.len())?;
        self.members.push(Member {
            socket,
            stage: Stage::Connecting,
            answer: [0; 4],
            have: 0,
        });
        Ok(())
    }

    /// Waits for something to happen to them; false if nothing did.
    pub(super) fn turn(
        &mut self,
        poller: &mut Poller,
        patience: Duration,
    ) -> Result<bool, Failure> {
        let mut happened = false;
        for index in poller.wait(patience)? {
            happened = true;
            self.advance(index)?;
        }
        Ok(happened)
    }

    /// Something happened to the client with this number.
    pub(super) fn advance(&mut self, index: usize) -> Result<(), Failure> {
        let nonce = index as u32;
        let member = &mut self.members[index];
        match member.stage {
            Stage::Connecting => {
                sockopt::socket_error(&member.socket)?
                    .map_err(|err| format!("client {index} cannot connect: {err}"))?;
                send(&member.socket, &greeting(nonce))?;
                member.stage = Stage::Greeting;
            }
            Stage::Greeting => {
                if !receive(&member.socket, &mut member.answer, &mut member.have)? {
                    return Ok(());
                }
                if member.answer != nonce.to_le_bytes() {
                    return Err(format!("client {index} got another client's PING answer").into());
                }
                member.have = 0;
                match &self.request {
                    Some(request) => {
                        send(&member.socket, request)?;
                        member.stage = Stage::Asking;
                    }
                    None => {
                        member.stage = Stage::Done;
                        self.done += 1;
                    }
                }
            }
            Stage::Asking => {
                if receive(&member.socket, &mut member.answer[..1], &mut member.have)? {
                    if member.answer[0] != READY {
                        return Err("a barrier was answered with something else".into());
                    }
                    member.stage = Stage::Done;
                    self.done += 1;
                }
            }
            Stage::Done => return Err(format!("client {index} was sent too much or closed").into()),
        }
        Ok(())
    }
}

/// Connect, greet, meet: the start of a job.
pub(super) fn connect_and_meet(task: &Task, wanted: usize) -> Result<Sample, Failure> {
    let conns = affordable(wanted);
    let mut request = Vec::new();
    Request::Barrier {
        key: &task.fresh_key(0),
        world_size: conns as i64,
    }
    .encode(&mut request);
    let mut poller = Poller::new(256)?;
    let mut crowd = Crowd::new(task.server, Some(request));
    let cpu = cpu::used_by(task.server_pid)?;
    let begin = Instant::now();
    for _ in 0..conns {
        crowd.dial(&poller)?;
    }
    while crowd.done < conns {
        crowd.turn(&mut poller, PATIENCE)?;
        if begin.elapsed() > PATIENCE {
            return Err(format!("{} of {conns} met within {PATIENCE:?}", crowd.done).into());
        }
    }
    let elapsed = begin.elapsed();
    let cpu = cpu::used_by(task.server_pid)? - cpu;
    let mut sample = Sample::default();
    sample.note("reached_conns", conns as f64);
    sample.note("total_ms", elapsed.as_secs_f64() * 1e3);
    if !cpu.is_zero() {
        sample.note("server_cpu_ms", cpu.as_secs_f64() * 1e3);
    }
    Ok(sample)
}
