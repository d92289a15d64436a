//! How long one client waits while others misbehave.

use std::io::{self, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use phalanx_store::tcp::wire::Request;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use super::crowd::{Crowd, PATIENCE, affordable};
use super::net::{Poller, connect_all, receive};
use super::probe::Probe;
use super::{Sample, Task};
use crate::Failure;

/// The others are served in small portions, so that the probe is never kept waiting by them.
const PORTION: usize = 16;
/// A trickled value; with one byte per turn it outlasts the usual window.
const TRICKLED_LEN: usize = 4 << 20;
/// Keys of a trickled list, the most that PyTorch's server takes.
const TRICKLED_KEYS: usize = 128 << 10;
/// Time between two arrivals.
const ARRIVAL_PACE: Duration = Duration::from_millis(100);
/// How long the last answer may take once the disturbance is over.
const LAST_ANSWER: Duration = Duration::from_secs(30);

/// What the others do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Disturbance {
    /// Nothing: what the same client sees in peace.
    None,
    /// One sends a long `SET`, a byte at a time, without a pause.
    TrickleValue,
    /// One sends a `CHECK` of very many keys, a byte at a time, without a pause.
    TrickleList,
    /// Many connect at once, in as many waves as the server's queue needs; the window lasts until
    /// all are in.
    Storm { conns: usize },
    /// Some connect one by one; the window lasts until all are in. It begins when the parent
    /// process, told that everything is ready, sends a line.
    Arrivals { conns: usize },
}

pub(super) fn run(task: &Task, disturbance: Disturbance) -> Result<Sample, Failure> {
    // Two, because the others would queue up before the probe in a common one.
    let mut probe_poller = Poller::new(1)?;
    let mut poller = Poller::new(PORTION)?;
    let mut probe = Probe::new(task.server, &probe_poller)?;
    let mut others = Others::new(task, disturbance, &poller)?;
    if let Disturbance::Arrivals { .. } = disturbance {
        println!("ready");
        io::stdin().read_line(&mut String::new())?;
    }
    let mut elapsed = Duration::ZERO;
    loop {
        others.prepare(task, &mut poller)?;
        elapsed += attend(&mut probe, &mut probe_poller, &mut others, &mut poller)?;
        if others.have_all_come() || elapsed > PATIENCE {
            break;
        }
    }
    let mut sample = Sample::default();
    sample.note("window_ms", elapsed.as_secs_f64() * 1e3);
    others.finish(&mut sample);
    probe.finish(&mut sample);
    Ok(sample)
}

/// One window; returns how long it was.
fn attend(
    probe: &mut Probe,
    probe_poller: &mut Poller,
    others: &mut Others,
    poller: &mut Poller,
) -> Result<Duration, Failure> {
    let begin = Instant::now();
    probe.begin();
    others.begin();
    while !others.have_finished(begin.elapsed()) && begin.elapsed() < PATIENCE {
        probe.ask()?;
        let mut busy = others.act(poller, begin.elapsed())?;
        for number in poller.wait(Duration::ZERO)? {
            busy = true;
            others.advance(number)?;
        }
        let patience = match busy {
            true => Duration::ZERO,
            false => probe.pause(),
        };
        if probe_poller.wait(patience)?.next().is_some() {
            probe.listen()?;
        }
    }
    let elapsed = begin.elapsed();
    while probe.is_waiting() && begin.elapsed() < elapsed + LAST_ANSWER {
        if probe_poller.wait(LAST_ANSWER)?.next().is_some() {
            probe.listen()?;
        }
    }
    Ok(elapsed)
}

/// Keeps the server from running while it lives.
struct Held(Pid);

impl Held {
    fn new(server_pid: u32) -> Result<Self, Failure> {
        let pid = Pid::from_raw(server_pid as i32).ok_or("the server has no process number")?;
        kill_process(pid, Signal::STOP)?;
        Ok(Self(pid))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

enum Others {
    Nobody {
        window: Duration,
    },
    Trickler {
        window: Duration,
        socket: TcpStream,
        request: Vec<u8>,
        sent: usize,
    },
    Storm {
        crowd: Crowd,
        wanted: usize,
        held: Option<Held>,
    },
    Arrivals {
        crowd: Crowd,
        wanted: usize,
    },
}

impl Others {
    fn new(task: &Task, disturbance: Disturbance, poller: &Poller) -> Result<Self, Failure> {
        let window = task.window();
        let crowd = Crowd::new(task.server, None);
        Ok(match disturbance {
            Disturbance::None => Self::Nobody { window },
            Disturbance::TrickleValue | Disturbance::TrickleList => {
                let socket = connect_all(task.server, 1)?.remove(0);
                poller.add(&socket, 0)?;
                Self::Trickler {
                    window,
                    socket,
                    request: trickled(task, disturbance),
                    sent: 0,
                }
            }
            Disturbance::Storm { conns } => Self::Storm {
                crowd,
                wanted: affordable(conns),
                held: None,
            },
            Disturbance::Arrivals { conns } => Self::Arrivals {
                crowd,
                wanted: conns,
            },
        })
    }

    /// Before a window. A generator with one thread connects more slowly than a server accepts, so
    /// the server is held back until as many have dialled as its queue takes.
    fn prepare(&mut self, task: &Task, poller: &mut Poller) -> Result<(), Failure> {
        if let Self::Storm {
            crowd,
            wanted,
            held,
        } = self
        {
            *held = Some(Held::new(task.server_pid)?);
            for _ in 0..accept_queue().min(*wanted - crowd.len()) {
                crowd.dial(poller)?;
            }
            while crowd.turn(poller, Duration::ZERO)? {}
        }
        Ok(())
    }

    fn begin(&mut self) {
        if let Self::Storm { held, .. } = self {
            *held = None;
        }
    }

    fn have_finished(&self, elapsed: Duration) -> bool {
        match self {
            Self::Nobody { window } | Self::Trickler { window, .. } => elapsed >= *window,
            Self::Storm { crowd, .. } => crowd.done == crowd.len(),
            Self::Arrivals { crowd, wanted } => crowd.done == *wanted,
        }
    }

    /// There is no further window.
    fn have_all_come(&self) -> bool {
        match self {
            Self::Storm { crowd, wanted, .. } => crowd.len() == *wanted,
            _ => true,
        }
    }

    /// Does a little; true if there is more to do at once.
    fn act(&mut self, poller: &Poller, elapsed: Duration) -> Result<bool, Failure> {
        match self {
            Self::Nobody { .. } | Self::Storm { .. } => {}
            Self::Trickler {
                socket,
                request,
                sent,
                ..
            } => {
                // The last byte is never sent: the request stays unfinished.
                if *sent + 1 < request.len() {
                    match socket.write(&request[*sent..=*sent]) {
                        Ok(n) => *sent += n,
                        Err(err) if err.kind() == io::ErrorKind::WouldBlock => {}
                        Err(err) => return Err(format!("trickling a request: {err}").into()),
                    }
                    return Ok(true);
                }
            }
            Self::Arrivals { crowd, wanted } => {
                if crowd.len() < *wanted && elapsed >= ARRIVAL_PACE * crowd.len() as u32 {
                    crowd.dial(poller)?;
                }
            }
        }
        Ok(false)
    }

    fn advance(&mut self, number: usize) -> Result<(), Failure> {
        match self {
            Self::Storm { crowd, .. } | Self::Arrivals { crowd, .. } => crowd.advance(number),
            Self::Trickler { socket, .. } => {
                receive(socket, &mut [0], &mut 0)?;
                Err("a request that is not whole was answered".into())
            }
            Self::Nobody { .. } => Err("an event for nobody".into()),
        }
    }

    fn finish(self, sample: &mut Sample) {
        let (crowd, wanted) = match self {
            Self::Nobody { .. } => return,
            Self::Trickler { sent, .. } => return sample.note("trickled_bytes", sent as f64),
            Self::Storm { crowd, wanted, .. } | Self::Arrivals { crowd, wanted } => (crowd, wanted),
        };
        sample.note("reached_conns", crowd.done as f64);
        if crowd.done < wanted {
            sample.problem = Some(format!("{} of {wanted} clients came in", crowd.done));
        }
    }
}

/// Connections that may wait to be accepted, with a margin: what is over is dropped, and repeated
/// only after a second.
fn accept_queue() -> usize {
    let text = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap_or_default();
    let limit: usize = text.trim().parse().unwrap_or(128);
    (limit - limit / 16).max(1)
}

fn trickled(task: &Task, disturbance: Disturbance) -> Vec<u8> {
    let mut request = Vec::new();
    if disturbance == Disturbance::TrickleList {
        let keys = &vec![b"k".to_vec(); TRICKLED_KEYS];
        Request::Check { keys }.encode(&mut request);
    } else {
        Request::Set {
            key: &task.fresh_key(0),
            value: &vec![b't'; TRICKLED_LEN],
        }
        .encode(&mut request);
    }
    request
}
