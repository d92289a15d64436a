//! The roof: a responder that counts bytes and sends fixed answers.
//!
//! No parser, no table, the fewest system calls. What a real server reaches of its pairs per CPU
//! second is what parsing and storing cost; the rest is the kernel's.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};

use crate::Failure;
use crate::bench::load::Pattern;
use crate::bench::load::pairs::{ANSWER_LEN, Requests, VALUE_LEN};

/// Answers set+get pairs without looking at them; started by `phalanx bench store`.
#[derive(clap::Args)]
pub(crate) struct Args {
    pattern: Pattern,
}

const LISTENER: u64 = u64::MAX;
/// `VALIDATE` and `PING`; the answer repeats the last four bytes.
const GREETING_LEN: usize = 10;

struct Client {
    socket: TcpStream,
    greeted: bool,
    /// Which exchange of the cycle comes next, and what has arrived of it.
    step: usize,
    have: usize,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
    let exchanges = exchanges(args.pattern);
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("listening on {}", listener.local_addr()?);
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(
        &epoll,
        &listener,
        EventData::new_u64(LISTENER),
        EventFlags::IN,
    )?;
    let mut clients: Vec<Option<Client>> = Vec::new();
    let mut events = Vec::with_capacity(256);
    let mut scratch = vec![0; 64 << 10];
    loop {
        epoll::wait(&epoll, spare_capacity(&mut events), None)?;
        for event in events.drain(..) {
            if event.data.u64() == LISTENER {
                let socket = listener.accept()?.0;
                socket.set_nodelay(true)?;
                let number = EventData::new_u64(clients.len() as u64);
                epoll::add(&epoll, &socket, number, EventFlags::IN)?;
                clients.push(Some(Client {
                    socket,
                    greeted: false,
                    step: 0,
                    have: 0,
                }));
                continue;
            }
            let slot = &mut clients[event.data.u64() as usize];
            if slot
                .as_mut()
                .is_some_and(|client| client.serve(&exchanges, &mut scratch).is_none())
            {
                *slot = None;
            }
        }
    }
}

/// After so many bytes, this answer.
fn exchanges(pattern: Pattern) -> Vec<(usize, Vec<u8>)> {
    let Requests { set, wait, get } = Requests::new(0);
    let mut value = vec![b'v'; ANSWER_LEN];
    value[..8].copy_from_slice(&(VALUE_LEN as u64).to_le_bytes());
    match pattern {
        Pattern::Torch => vec![(set.len() + wait.len(), vec![0]), (get.len(), value)],
        Pattern::Pipelined => vec![(set.len() + get.len(), value)],
    }
}

impl Client {
    /// One read and one write at most; `None` when the client has left.
    fn serve(&mut self, exchanges: &[(usize, Vec<u8>)], scratch: &mut [u8]) -> Option<()> {
        let n = self.socket.read(scratch).ok().filter(|&n| n > 0)?;
        if !self.greeted {
            self.greeted = true;
            let nonce = scratch.get(GREETING_LEN - 4..n.min(GREETING_LEN))?;
            return self.socket.write_all(nonce).ok();
        }
        self.have += n;
        let (needed, answer) = &exchanges[self.step];
        if self.have >= *needed {
            self.have -= needed;
            self.step = (self.step + 1) % exchanges.len();
            self.socket.write_all(answer).ok()?;
        }
        Some(())
    }
}
