//! The loop of `phalanx run`: events from processes, signals and other nodes go to the state
//! machines, and what these decide is done.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use phalanx_store::{JobToken, StoreError, TcpStoreServer};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use super::agent::{Action, Agent, Input};
use super::job::Job;
use super::link::{Hub, Spoke};
use super::message::{AgentId, Command, End, Message, News, Outcome, Share, Stop};
use super::output::say;
use super::workers::{Ended, Workers};

/// How often the coordinator looks at the time.
const TICK: Duration = Duration::from_millis(250);
/// How long ranks that fail together have to end, before the others are told to.
const SETTLING: Duration = Duration::from_millis(300);
/// How long node 0 waits for the others to hear of the end, before it takes the store away.
const FAREWELL: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) enum Event {
    Exited { local: usize },
    Signal(i32),
    Command(Command),
    Message(Message),
    LinkLost(String),
}

/// The stores in which ranks meet: a new one for each attempt, as PyTorch's processes expect, which
/// use the same keys in every attempt.
#[derive(Debug)]
pub(super) struct Stores {
    pub(super) addrs: Vec<SocketAddr>,
    pub(super) token: Option<JobToken>,
    pub(super) current: Option<TcpStoreServer>,
}

impl Stores {
    fn serve_next(&mut self) -> Result<u16, StoreError> {
        // The port may be the same.
        self.current = None;
        let server = TcpStoreServer::start(&self.addrs, self.token.clone())?;
        let port = server.local_addr().port();
        self.current = Some(server);
        Ok(port)
    }
}

/// Where decisions about the whole job are made.
#[derive(Debug)]
pub(super) enum Seat {
    /// Here. With other nodes, they are told through the hub.
    Coordinator {
        job: Box<Job>,
        stores: Stores,
        hub: Option<Hub>,
    },
    /// On node 0.
    Member(Spoke),
}

#[derive(Debug)]
pub(super) struct Supervisor {
    pub(super) node: usize,
    pub(super) id: AgentId,
    pub(super) agent: Agent,
    pub(super) seat: Seat,
    pub(super) workers: Workers,
    pub(super) grace: Duration,
    pub(super) sender: Sender<Event>,
    pub(super) events: Receiver<Event>,
    /// The last outcome that the person at the terminal was told.
    pub(super) told: Outcome,
}

const TERMINATING: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT];
const FORWARDED: [i32; 2] = [SIGUSR1, SIGUSR2];

/// Signals become events from now on, instead of ending this process.
pub(super) fn listen_for_signals(events: Sender<Event>) -> io::Result<()> {
    let mut signals = Signals::new(TERMINATING.iter().chain(&FORWARDED))?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in signals.forever() {
                if events.send(Event::Signal(signal)).is_err() {
                    return;
                }
            }
        })?;
    Ok(())
}

impl Supervisor {
    /// Runs the job to its end on this node.
    pub(super) fn run(mut self, joined: News) -> Outcome {
        let start = Instant::now();
        let mut inputs = VecDeque::new();
        let (mut grace, mut settled): (Option<Instant>, Option<Instant>) = (None, None);
        self.tell(joined, &mut inputs);
        loop {
            while let Some(input) = inputs.pop_front() {
                for action in self.agent.handle(input) {
                    match action {
                        Action::StartGrace => grace = Some(Instant::now() + self.grace),
                        Action::StartSettling => settled = Some(Instant::now() + SETTLING),
                        Action::Exit(outcome) => {
                            if outcome != self.told {
                                say(&outcome);
                            }
                            self.farewell();
                            return outcome;
                        }
                        other => self.perform(other, &mut inputs),
                    }
                }
            }
            let now = Instant::now();
            if grace.take_if(|end| *end <= now).is_some() {
                inputs.push_back(Input::GraceOver);
            }
            if settled.take_if(|end| *end <= now).is_some() {
                inputs.push_back(Input::Settled);
            }
            if !inputs.is_empty() {
                continue;
            }
            let next = [grace, settled].into_iter().flatten().min();
            let wait = next.map_or(TICK, |end| TICK.min(end - now));
            match self.events.recv_timeout(wait) {
                Ok(event) => self.received(event, &mut inputs),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => unreachable!("a sender is held here"),
            }
            if let Seat::Coordinator { job, .. } = &mut self.seat {
                let commands = job.tick(start.elapsed());
                self.publish(commands, &mut inputs);
            }
        }
    }

    fn received(&mut self, event: Event, inputs: &mut VecDeque<Input>) {
        match event {
            Event::Exited { local } => match self.workers.reap(local) {
                Some(Ok(Ended { pid, end, stderr })) => inputs.push_back(Input::Exited {
                    local,
                    pid,
                    end,
                    stderr,
                }),
                Some(Err(err)) => {
                    let why = format!("cannot wait for a rank: {err}");
                    inputs.push_back(Input::LinkLost(why));
                }
                None => {}
            },
            Event::Signal(signal) if TERMINATING.contains(&signal) => {
                inputs.push_back(Input::Terminate(signal));
            }
            Event::Signal(signal) => inputs.push_back(Input::Forward(signal)),
            Event::Command(command) => inputs.push_back(Input::Command(command)),
            Event::LinkLost(why) => inputs.push_back(Input::LinkLost(why)),
            Event::Message(message) => self.coordinate(message, inputs),
        }
    }

    fn perform(&mut self, action: Action, inputs: &mut VecDeque<Input>) {
        match action {
            Action::Spawn(share) => self.spawn(&share, inputs),
            Action::Signal { locals, signal } => self.workers.signal_groups(&locals, signal),
            Action::SignalLeaders { locals, signal } => {
                self.workers.signal_leaders(&locals, signal);
            }
            Action::Tell(news) => self.tell(news, inputs),
            Action::Report(stop) => {
                report(&stop);
                self.told = stop.cause;
            }
            Action::Notify(text) => say(text),
            Action::StartGrace | Action::StartSettling | Action::Exit(_) => {
                unreachable!("the loop does these itself")
            }
        }
    }

    fn spawn(&mut self, share: &Share, inputs: &mut VecDeque<Input>) {
        let Err((first, err)) = self.workers.spawn(share, &self.sender) else {
            return;
        };
        // Those that were never started have ended, too.
        let not_started = |local| Input::Exited {
            local,
            pid: 0,
            end: End::NotStarted {
                why: format!("it cannot be started: {err}"),
                code: 1,
            },
            stderr: vec![],
        };
        inputs.extend((first..share.nproc).map(not_started));
    }

    fn tell(&mut self, what: News, inputs: &mut VecDeque<Input>) {
        match &self.seat {
            Seat::Coordinator { .. } => {
                let message = Message {
                    node: self.node,
                    agent: self.id,
                    what,
                };
                self.coordinate(message, inputs);
            }
            Seat::Member(spoke) => {
                if let Err(err) = spoke.tell(what) {
                    inputs.push_back(Input::LinkLost(format!("node 0 is lost: {err}")));
                }
            }
        }
    }

    fn coordinate(&mut self, message: Message, inputs: &mut VecDeque<Input>) {
        if let Seat::Coordinator { job, .. } = &mut self.seat {
            let commands = job.handle(message);
            self.publish(commands, inputs);
        }
    }

    fn publish(&mut self, commands: Vec<Command>, inputs: &mut VecDeque<Input>) {
        let Seat::Coordinator { hub, stores, .. } = &mut self.seat else {
            return;
        };
        for mut command in commands {
            if let Command::Start(start) = &mut command {
                match stores.serve_next() {
                    Ok(port) => start.store_port = port,
                    Err(err) => inputs.push_back(Input::LinkLost(err.to_string())),
                }
            }
            if let Some(hub) = hub
                && let Err(err) = hub.publish(&command)
            {
                let why = format!("this node's own store is lost: {err}");
                inputs.push_back(Input::LinkLost(why));
            }
            inputs.push_back(Input::Command(command));
        }
    }

    /// Keeps the store until the other nodes have heard of the end.
    fn farewell(&mut self) {
        let end = Instant::now() + FAREWELL;
        while let Seat::Coordinator {
            job, hub: Some(_), ..
        } = &mut self.seat
            && !job.is_left()
            && let Some(left) = end.checked_duration_since(Instant::now())
        {
            match self.events.recv_timeout(left) {
                Ok(Event::Message(message)) => drop(job.handle(message)),
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }
}

fn report(stop: &Stop) {
    say(&stop.cause);
    if let Some(restart) = stop.restart {
        let (number, of) = (restart.number, restart.of);
        say(format_args!(
            "stopping all ranks, then restart {number} of at most {of}"
        ));
    }
}
