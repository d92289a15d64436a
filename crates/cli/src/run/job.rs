//! The whole job, as its coordinator sees it: who is there, which attempt runs, what comes next.
//!
//! A state machine like [`agent`](super::agent): messages and the passing of time go in, commands
//! for all agents come out. Time is a duration since the start, which the caller measures.

use std::time::Duration;

use super::culprit;
use super::message::{
    Command, End, Member, Message, News, Outcome, RankFailure, Restart, Start, Stop,
};

/// How long other nodes have to tell of failures that belong together.
const SETTLING: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) nnodes: usize,
    pub(super) max_restarts: usize,
    /// How long to wait for all nodes to be there.
    pub(super) join: Duration,
    /// An agent that is silent for so long is lost.
    pub(super) silence: Duration,
}

#[derive(Debug)]
pub(super) struct Job {
    limits: Limits,
    nodes: Vec<Option<Node>>,
    phase: Phase,
    attempt: usize,
    restarts: usize,
    now: Duration,
}

/// A node whose agent has joined.
#[derive(Debug)]
struct Node {
    member: Member,
    heard: Duration,
    step: Step,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Ready,
    Running,
    Succeeded,
    Left,
}

#[derive(Debug)]
enum Phase {
    /// Not all nodes are there.
    Gathering {
        since: Duration,
    },
    Running,
    /// Ranks have failed; other nodes may have something to say about it.
    Failing {
        failures: Vec<RankFailure>,
        since: Duration,
    },
    /// Waiting until no rank runs any more. Without an outcome, another attempt follows.
    Stopping {
        then: Option<Outcome>,
    },
    Finished,
}

impl Job {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            nodes: (0..limits.nnodes).map(|_| None).collect(),
            phase: Phase::Gathering {
                since: Duration::ZERO,
            },
            attempt: 0,
            restarts: 0,
            now: Duration::ZERO,
        }
    }

    /// Everybody has heard that the job is over.
    pub(super) fn is_left(&self) -> bool {
        matches!(self.phase, Phase::Finished)
            && self
                .nodes
                .iter()
                .flatten()
                .all(|node| node.step == Step::Left)
    }

    pub(super) fn handle(&mut self, message: Message) -> Vec<Command> {
        let Message { node, agent, what } = message;
        if let News::Joined {
            nproc,
            nnodes,
            host,
        } = what
        {
            let member = Member { agent, nproc, host };
            return self.joined(node, nnodes, member);
        }
        let now = self.now;
        let Some(slot) = self.nodes.get_mut(node).and_then(Option::as_mut) else {
            return vec![];
        };
        if slot.member.agent != agent {
            return vec![];
        }
        slot.heard = now;
        match what {
            News::Joined { .. } | News::Beat => vec![],
            News::Failed(failures) => self.failed(failures),
            News::Succeeded { attempt } if attempt == self.attempt => {
                slot.step = Step::Succeeded;
                self.finish_if_all_succeeded()
            }
            News::Stopped { attempt } if attempt == self.attempt => {
                slot.step = Step::Ready;
                self.go_on_if_stopped()
            }
            News::Succeeded { .. } | News::Stopped { .. } => vec![],
            News::Interrupted { signal } => self.interrupted(signal),
            News::Left => {
                slot.step = Step::Left;
                self.go_on_if_stopped()
            }
        }
    }

    /// Time has passed.
    pub(super) fn tick(&mut self, now: Duration) -> Vec<Command> {
        self.now = self.now.max(now);
        let mut commands = Vec::new();
        // Node 0 is where this runs: if it is lost, so is this.
        for node in 1..self.nodes.len() {
            let silent = self.nodes[node]
                .as_ref()
                .map(|n| self.now.saturating_sub(n.heard))
                .filter(|silent| *silent > self.limits.silence);
            if let Some(silent) = silent {
                commands.extend(self.lost(node, silent));
            }
        }
        if let Phase::Failing { since, .. } = self.phase
            && self.now.saturating_sub(since) >= SETTLING
        {
            commands.extend(self.conclude());
        }
        if let Phase::Gathering { since } = self.phase
            && self.now.saturating_sub(since) > self.limits.join
        {
            let missing = self.missing().collect();
            commands.extend(self.finish(Outcome::NotJoined {
                missing,
                waited_s: self.limits.join.as_secs(),
            }));
        }
        commands
    }

    fn joined(&mut self, node: usize, nnodes: usize, member: Member) -> Vec<Command> {
        let agent = member.agent;
        let refuse = |why: String| vec![Command::Refuse { agent, why }];
        if nnodes != self.limits.nnodes || node >= nnodes {
            return refuse(format!(
                "--nnodes {nnodes} --node-rank {node} does not fit node 0, which was started with \
                 --nnodes {}",
                self.limits.nnodes
            ));
        }
        if let Some(holder) = &self.nodes[node] {
            return refuse(format!(
                "--node-rank {node} is taken by phalanx run on host {}; give each node its own, or \
                 try again in {} s if that one is gone",
                holder.member.host,
                self.limits.silence.as_secs() + 1
            ));
        }
        self.nodes[node] = Some(Node {
            member,
            heard: self.now,
            step: Step::Ready,
        });
        self.start_if_complete()
    }

    fn start_if_complete(&mut self) -> Vec<Command> {
        if !matches!(self.phase, Phase::Gathering { .. }) || self.nodes.iter().any(Option::is_none)
        {
            return vec![];
        }
        self.phase = Phase::Running;
        let members = self.nodes.iter_mut().flatten().map(|node| {
            node.step = Step::Running;
            node.member.clone()
        });
        let start = Start {
            attempt: self.attempt,
            // Known when it is served; this has no sockets.
            store_port: 0,
            members: members.collect(),
        };
        vec![Command::Start(start)]
    }

    fn missing(&self) -> impl Iterator<Item = usize> {
        (0..self.nodes.len()).filter(|&node| self.nodes[node].is_none())
    }

    fn failed(&mut self, news: Vec<RankFailure>) -> Vec<Command> {
        let attempt = self.attempt;
        let news = news.into_iter().filter(|f| f.attempt == attempt);
        match &mut self.phase {
            Phase::Failing { failures, .. } => failures.extend(news),
            Phase::Running => {
                self.phase = Phase::Failing {
                    failures: news.collect(),
                    since: self.now,
                };
            }
            // What follows from the first failure, or from stopping.
            _ => return vec![],
        }
        // Alone, there is nobody else to hear.
        match self.limits.nnodes {
            1 => self.conclude(),
            _ => vec![],
        }
    }

    fn conclude(&mut self) -> Vec<Command> {
        let Phase::Failing { failures, .. } = &mut self.phase else {
            return vec![];
        };
        match culprit::pick(std::mem::take(failures)) {
            Some(failure) => {
                let again = !matches!(failure.end, End::NotStarted { .. });
                self.broken(Outcome::Failed(Box::new(failure)), again)
            }
            None => {
                self.phase = Phase::Running;
                vec![]
            }
        }
    }

    /// An attempt cannot succeed any more.
    fn broken(&mut self, cause: Outcome, may_restart: bool) -> Vec<Command> {
        if !matches!(self.phase, Phase::Running | Phase::Failing { .. }) {
            return vec![];
        }
        let restart = may_restart && self.restarts < self.limits.max_restarts;
        let restart = restart.then(|| {
            self.restarts += 1;
            Restart {
                number: self.restarts,
                of: self.limits.max_restarts,
            }
        });
        self.phase = Phase::Stopping {
            then: restart.is_none().then(|| cause.clone()),
        };
        let stop = Command::Stop(Stop {
            attempt: self.attempt,
            cause,
            restart,
        });
        let mut commands = vec![stop];
        commands.extend(self.go_on_if_stopped());
        commands
    }

    fn lost(&mut self, node: usize, silent: Duration) -> Vec<Command> {
        let Some(gone) = self.nodes[node].take() else {
            return vec![];
        };
        let cause = Outcome::NodeLost {
            node,
            host: gone.member.host,
            silent_s: silent.as_secs(),
        };
        match self.phase {
            // It had done its part, but a later attempt would need it.
            Phase::Running | Phase::Failing { .. } => self.broken(cause, true),
            // The job is over, or stops for another reason, which may be this one.
            Phase::Stopping { .. } => {
                let mut commands = vec![Command::Notice(cause.to_string())];
                commands.extend(self.go_on_if_stopped());
                commands
            }
            Phase::Gathering { .. } => vec![Command::Notice(cause.to_string())],
            Phase::Finished => vec![],
        }
    }

    fn interrupted(&mut self, signal: i32) -> Vec<Command> {
        let outcome = Outcome::Interrupted { signal };
        match &mut self.phase {
            Phase::Gathering { .. } => self.finish(outcome),
            Phase::Running | Phase::Failing { .. } => self.broken(outcome, false),
            Phase::Stopping { then } => {
                then.get_or_insert(outcome);
                self.go_on_if_stopped()
            }
            Phase::Finished => vec![],
        }
    }

    fn finish_if_all_succeeded(&mut self) -> Vec<Command> {
        let all = |node: &Option<Node>| node.as_ref().is_some_and(|n| n.step == Step::Succeeded);
        match self.phase {
            Phase::Running if self.nodes.iter().all(all) => self.finish(Outcome::Success),
            _ => vec![],
        }
    }

    fn go_on_if_stopped(&mut self) -> Vec<Command> {
        let stopped = |node: &Node| !matches!(node.step, Step::Running | Step::Succeeded);
        let Phase::Stopping { then } = &self.phase else {
            return vec![];
        };
        if !self.nodes.iter().flatten().all(stopped) {
            return vec![];
        }
        match then.clone() {
            Some(outcome) => self.finish(outcome),
            None => {
                self.attempt += 1;
                self.phase = Phase::Gathering { since: self.now };
                let missing: Vec<String> = self.missing().map(|node| node.to_string()).collect();
                match missing.is_empty() {
                    true => self.start_if_complete(),
                    false => vec![Command::Notice(format!(
                        "waiting for node {}, for at most {} s: start phalanx run there again",
                        missing.join(", "),
                        self.limits.join.as_secs()
                    ))],
                }
            }
        }
    }

    fn finish(&mut self, outcome: Outcome) -> Vec<Command> {
        self.phase = Phase::Finished;
        vec![Command::Finish(outcome)]
    }
}

#[cfg(test)]
#[path = "job_tests.rs"]
mod tests;
