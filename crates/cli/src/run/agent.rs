//! One node's part of a job: which processes to start, to signal and to wait for.
//!
//! A state machine: what happened goes in, what to do comes out. It has no clock and touches no
//! process, so that every order of events can be tried.

use super::culprit;
use super::message::{AgentId, Command, End, News, Outcome, RankFailure, Share, Stop};

/// Something happened on this node.
#[derive(Debug)]
pub(super) enum Input {
    Command(Command),
    /// A rank ended; its local number.
    Exited {
        local: usize,
        pid: u32,
        end: End,
        stderr: Vec<String>,
    },
    /// This process was asked to end.
    Terminate(i32),
    /// This process got a signal that is for the ranks.
    Forward(i32),
    /// Ranks that failed together have had time to end.
    Settled,
    /// The time that ranks have to end by themselves is over.
    GraceOver,
    /// The coordinator cannot be reached any more.
    LinkLost(String),
}

/// Something to do.
#[derive(Debug, PartialEq)]
pub(super) enum Action {
    Spawn(Share),
    /// A signal to all processes of these ranks.
    Signal {
        locals: Vec<usize>,
        signal: i32,
    },
    /// A signal to these ranks alone, not to what they started.
    SignalLeaders {
        locals: Vec<usize>,
        signal: i32,
    },
    /// Say [`Input::Settled`] in a moment.
    StartSettling,
    /// Say [`Input::GraceOver`] when the grace period is over.
    StartGrace,
    Tell(News),
    /// Tell the person at the terminal.
    Report(Stop),
    Notify(String),
    Exit(Outcome),
}

#[derive(Debug)]
pub(super) struct Agent {
    id: AgentId,
    host: String,
    state: State,
    /// The end of this agent, once nothing runs any more.
    leaving: Option<Outcome>,
}

#[derive(Debug)]
enum State {
    /// No rank runs. After a stop or a success, `ended` says of which attempt.
    Idle {
        ended: Option<usize>,
    },
    Running(Crew),
    /// A rank has failed; others may fail of it, or have before it.
    Failing(Crew, Vec<RankFailure>, Patience),
    Stopping(Crew),
    Gone,
}

/// How often more to wait for a rank that others blame and that has not ended.
type Patience = usize;
const PATIENCE: Patience = 6;

/// The ranks of one attempt on this node.
#[derive(Debug)]
struct Crew {
    share: Share,
    alive: Vec<bool>,
}

impl Crew {
    fn living(&self) -> Vec<usize> {
        (0..self.alive.len()).filter(|&i| self.alive[i]).collect()
    }
}

const SIGKILL: i32 = signal_hook::consts::SIGKILL;
const SIGTERM: i32 = signal_hook::consts::SIGTERM;

impl Agent {
    pub(super) fn new(id: AgentId, host: String) -> Self {
        Self {
            id,
            host,
            state: State::Idle { ended: None },
            leaving: None,
        }
    }

    pub(super) fn handle(&mut self, input: Input) -> Vec<Action> {
        match input {
            Input::Command(Command::Start(start)) => match start.share_of(self.id) {
                Some(share) => self.start(share),
                None => vec![],
            },
            Input::Command(Command::Stop(stop)) => self.stop(stop),
            Input::Command(Command::Notice(text)) => vec![Action::Notify(text)],
            Input::Command(Command::Finish(outcome)) => self.leave(outcome),
            Input::Command(Command::Refuse { agent, why }) if agent == self.id => {
                self.leave(Outcome::Stranded { why })
            }
            Input::Command(Command::Refuse { .. }) => vec![],
            Input::Exited {
                local,
                pid,
                end,
                stderr,
            } => self.exited(local, pid, end, stderr),
            Input::Terminate(signal) => self.terminate(signal),
            Input::Forward(signal) => self.forward(signal),
            Input::Settled => self.settled(),
            Input::GraceOver => self.force(),
            Input::LinkLost(why) => self.leave(Outcome::Stranded { why }),
        }
    }

    fn start(&mut self, share: Share) -> Vec<Action> {
        if !matches!(self.state, State::Idle { .. }) || self.leaving.is_some() {
            return vec![];
        }
        self.state = State::Running(Crew {
            share,
            alive: vec![true; share.nproc],
        });
        vec![Action::Spawn(share)]
    }

    fn exited(&mut self, local: usize, pid: u32, end: End, stderr: Vec<String>) -> Vec<Action> {
        let (State::Running(crew) | State::Failing(crew, ..) | State::Stopping(crew)) =
            &mut self.state
        else {
            return vec![];
        };
        crew.alive[local] = false;
        let share = crew.share;
        let last = crew.living().is_empty();
        if matches!(self.state, State::Stopping(_)) {
            return if last { self.all_gone() } else { vec![] };
        }
        if !end.is_success() {
            return self.failed(RankFailure {
                rank: share.first_rank + local,
                attempt: share.attempt,
                host: self.host.clone(),
                pid,
                end,
                stderr,
            });
        }
        match &self.state {
            State::Running(_) if last => {
                let attempt = share.attempt;
                self.state = State::Idle {
                    ended: Some(attempt),
                };
                vec![Action::Tell(News::Succeeded { attempt })]
            }
            State::Failing(..) if last => self.conclude(),
            _ => vec![],
        }
    }

    fn failed(&mut self, failure: RankFailure) -> Vec<Action> {
        let (crew, failures, patience) = match self.take() {
            State::Running(crew) => (crew, vec![failure], None),
            State::Failing(crew, mut failures, patience) => {
                failures.push(failure);
                (crew, failures, Some(patience))
            }
            other => {
                self.state = other;
                return vec![];
            }
        };
        let last = crew.living().is_empty();
        self.state = State::Failing(crew, failures, patience.unwrap_or(PATIENCE));
        match last {
            true => self.conclude(),
            false if patience.is_none() => vec![Action::StartSettling],
            false => vec![],
        }
    }

    fn settled(&mut self) -> Vec<Action> {
        let State::Failing(crew, failures, patience) = &mut self.state else {
            return vec![];
        };
        let first = crew.share.first_rank;
        let mut living = crew.living().into_iter();
        let wanted = living.any(|local| culprit::is_blamed(first + local, failures));
        if wanted && *patience > 0 {
            *patience -= 1;
            return vec![Action::StartSettling];
        }
        self.conclude()
    }

    /// Tells who failed, and stops the others.
    fn conclude(&mut self) -> Vec<Action> {
        let State::Failing(_, failures, _) = &mut self.state else {
            return vec![];
        };
        let failures = std::mem::take(failures);
        let mut actions = vec![Action::Tell(News::Failed(failures))];
        actions.extend(self.begin_stop(SIGTERM));
        actions
    }

    fn take(&mut self) -> State {
        std::mem::replace(&mut self.state, State::Idle { ended: None })
    }

    fn stop(&mut self, stop: Stop) -> Vec<Action> {
        let attempt = stop.attempt;
        let actions = match &self.state {
            State::Running(crew) if crew.share.attempt == attempt => self.begin_stop(SIGTERM),
            State::Failing(crew, ..) if crew.share.attempt == attempt => self.conclude(),
            State::Idle { ended } if *ended == Some(attempt) => {
                vec![Action::Tell(News::Stopped { attempt })]
            }
            State::Stopping(crew) if crew.share.attempt == attempt => vec![],
            // From before this agent's time.
            _ => return vec![],
        };
        [Action::Report(stop)].into_iter().chain(actions).collect()
    }

    /// Asks all ranks to end. Those that do not are killed when the grace period is over.
    fn begin_stop(&mut self, signal: i32) -> Vec<Action> {
        let (State::Running(crew) | State::Failing(crew, ..)) = self.take() else {
            unreachable!("only what runs is stopped");
        };
        let locals = crew.living();
        self.state = State::Stopping(crew);
        match locals.is_empty() {
            true => self.all_gone(),
            false => vec![Action::Signal { locals, signal }, Action::StartGrace],
        }
    }

    fn force(&self) -> Vec<Action> {
        let State::Stopping(crew) = &self.state else {
            return vec![];
        };
        vec![Action::Signal {
            locals: crew.living(),
            signal: SIGKILL,
        }]
    }

    fn all_gone(&mut self) -> Vec<Action> {
        let State::Stopping(crew) = &self.state else {
            return vec![];
        };
        let attempt = crew.share.attempt;
        self.state = State::Idle {
            ended: Some(attempt),
        };
        let mut actions = vec![Action::Tell(News::Stopped { attempt })];
        actions.extend(self.exit_if_leaving());
        actions
    }

    fn terminate(&mut self, signal: i32) -> Vec<Action> {
        let mut actions = vec![Action::Tell(News::Interrupted { signal })];
        match &self.state {
            State::Running(_) | State::Failing(..) => actions.extend(self.begin_stop(signal)),
            // Asked twice, or when all were asked to end already: whoever asks does not want to
            // wait, nor another attempt.
            State::Stopping(_) => actions.extend(self.force()),
            State::Idle { .. } => actions.extend(self.leave(Outcome::Interrupted { signal })),
            State::Gone => {}
        }
        actions
    }

    fn forward(&self, signal: i32) -> Vec<Action> {
        match &self.state {
            State::Running(crew) | State::Failing(crew, ..) => vec![Action::SignalLeaders {
                locals: crew.living(),
                signal,
            }],
            _ => vec![],
        }
    }

    fn leave(&mut self, outcome: Outcome) -> Vec<Action> {
        self.leaving.get_or_insert(outcome);
        match &self.state {
            State::Running(_) | State::Failing(..) => self.begin_stop(SIGTERM),
            State::Idle { .. } => self.exit_if_leaving(),
            State::Stopping(_) | State::Gone => vec![],
        }
    }

    fn exit_if_leaving(&mut self) -> Vec<Action> {
        match &self.leaving {
            Some(outcome) if matches!(self.state, State::Idle { .. }) => {
                let exit = Action::Exit(outcome.clone());
                self.state = State::Gone;
                vec![Action::Tell(News::Left), exit]
            }
            _ => vec![],
        }
    }
}

#[cfg(test)]
#[path = "agent_tests.rs"]
mod tests;
