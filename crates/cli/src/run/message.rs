//! What the agents of a job tell each other, and how a job can end. Plain data.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One `phalanx run` among those of a job. The number tells a node's agent from its successor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AgentId(pub(super) u64);

/// From an agent to the job's coordinator, which is the agent of node 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Message {
    pub(super) node: usize,
    pub(super) agent: AgentId,
    pub(super) what: News,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum News {
    /// Ready to start this many ranks.
    Joined {
        nproc: usize,
        nnodes: usize,
        host: String,
    },
    /// Still there.
    Beat,
    /// Ranks ended badly, in this order; the agent stops its others without being told.
    Failed(Vec<RankFailure>),
    /// All ranks of this node ended well.
    Succeeded { attempt: usize },
    /// No rank of this node runs any more, after a stop or a failure.
    Stopped { attempt: usize },
    /// The agent was asked by a signal to end.
    Interrupted { signal: i32 },
    /// The end of the job was read here.
    Left,
}

/// From the coordinator to all agents, in one order for all of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Command {
    Start(Start),
    Stop(Stop),
    /// For the people at the terminals.
    Notice(String),
    /// Nothing runs any more; everybody leaves.
    Finish(Outcome),
    /// An agent that cannot take part.
    Refuse {
        agent: AgentId,
        why: String,
    },
}

/// Who takes part in an attempt, in the order of node ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Start {
    pub(super) attempt: usize,
    /// Where the ranks of this attempt find their store, on the host of node 0.
    pub(super) store_port: u16,
    pub(super) members: Vec<Member>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Member {
    pub(super) agent: AgentId,
    pub(super) nproc: usize,
    pub(super) host: String,
}

impl Start {
    /// The part of one agent; `None` if it has none.
    pub(super) fn share_of(&self, agent: AgentId) -> Option<Share> {
        let node = self.members.iter().position(|m| m.agent == agent)?;
        let me = &self.members[node];
        let ranks = |members: &[Member]| members.iter().map(|m| m.nproc).sum();
        Some(Share {
            attempt: self.attempt,
            store_port: self.store_port,
            node,
            nnodes: self.members.len(),
            first_rank: ranks(&self.members[..node]),
            nproc: me.nproc,
            world_size: ranks(&self.members),
            alone_on_host: self.members.iter().filter(|m| m.host == me.host).count() == 1,
        })
    }
}

/// The ranks that one agent runs in one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) attempt: usize,
    pub(super) store_port: u16,
    pub(super) node: usize,
    pub(super) nnodes: usize,
    pub(super) first_rank: usize,
    pub(super) nproc: usize,
    pub(super) world_size: usize,
    /// No other agent of the job runs ranks on this host.
    pub(super) alone_on_host: bool,
}

/// End an attempt: why, and whether another one follows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Stop {
    pub(super) attempt: usize,
    pub(super) cause: Outcome,
    pub(super) restart: Option<Restart>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Restart {
    pub(super) number: usize,
    pub(super) of: usize,
}

/// How a job, or an attempt, ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Outcome {
    Success,
    Failed(Box<RankFailure>),
    /// An agent has not been heard of.
    NodeLost {
        node: usize,
        host: String,
        silent_s: u64,
    },
    /// Not all nodes came.
    NotJoined {
        missing: Vec<usize>,
        waited_s: u64,
    },
    Interrupted {
        signal: i32,
    },
    /// This agent cannot go on, whatever the others do.
    Stranded {
        why: String,
    },
}

impl Outcome {
    /// What `phalanx run` ends with: a rank's own code, or 128 and the signal as shells have it.
    pub(super) fn exit_code(&self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Failed(failure) => failure.end.exit_code(),
            Self::Interrupted { signal } => signal_code(*signal),
            Self::NodeLost { .. } | Self::NotJoined { .. } | Self::Stranded { .. } => 1,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Success => f.write_str("all ranks succeeded"),
            Self::Failed(failure) => failure.fmt(f),
            Self::NodeLost {
                node,
                host,
                silent_s,
            } => write!(
                f,
                "node {node} (host {host}) is lost: nothing was heard of its phalanx run for \
                 {silent_s} s"
            ),
            Self::NotJoined { missing, waited_s } => {
                let nodes: Vec<String> = missing.iter().map(usize::to_string).collect();
                let noun = if nodes.len() == 1 { "node" } else { "nodes" };
                write!(
                    f,
                    "{noun} {} did not join within {waited_s} s; start phalanx run there with \
                     --node-rank and the same --nnodes, --rdzv-endpoint and --rdzv-id",
                    nodes.join(", ")
                )
            }
            Self::Interrupted { signal } => {
                write!(f, "ended by {}", signal_name(*signal))
            }
            Self::Stranded { why } => f.write_str(why),
        }
    }
}

/// The first rank of an attempt that ended badly.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct RankFailure {
    pub(super) rank: usize,
    pub(super) attempt: usize,
    pub(super) host: String,
    pub(super) pid: u32,
    pub(super) end: End,
    /// Its last lines on stderr.
    pub(super) stderr: Vec<String>,
}

impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            attempt,
            host,
            pid,
            end,
            stderr,
        } = self;
        write!(
            f,
            "rank {rank} failed first: {end} (attempt {attempt}, pid {pid} on {host})"
        )?;
        if matches!(end, End::NotStarted { .. }) {
            return Ok(());
        }
        if stderr.is_empty() {
            return f.write_str("\n  it wrote nothing to stderr");
        }
        f.write_str("\n  its last lines on stderr:")?;
        stderr
            .iter()
            .try_for_each(|line| write!(f, "\n  [{rank}] {line}"))
    }
}

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum End {
    Code(i32),
    Signal(i32),
    /// It never ran; no further attempt would change that.
    NotStarted {
        why: String,
        code: u8,
    },
}

impl End {
    pub(super) fn of(status: std::process::ExitStatus) -> Self {
        use std::os::unix::process::ExitStatusExt;
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => unreachable!("a process that ended has a code or a signal"),
        }
    }

    pub(super) fn is_success(&self) -> bool {
        *self == Self::Code(0)
    }

    fn exit_code(&self) -> u8 {
        match self {
            Self::Code(code) => u8::try_from(*code).unwrap_or(1),
            Self::Signal(signal) => signal_code(*signal),
            Self::NotStarted { code, .. } => *code,
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "killed by {}", signal_name(*signal)),
            Self::NotStarted { why, .. } => f.write_str(why),
        }
    }
}

fn signal_code(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// `SIGKILL`, or `signal 42`.
pub(super) fn signal_name(signal: i32) -> String {
    match signal_hook::low_level::signal_name(signal) {
        Some(name) => name.to_owned(),
        None => format!("signal {signal}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_counted_over_nodes_of_different_sizes() {
        let member = |agent, nproc, host: &str| Member {
            agent: AgentId(agent),
            nproc,
            host: host.into(),
        };
        let start = Start {
            attempt: 3,
            store_port: 4711,
            members: vec![member(7, 2, "a"), member(8, 4, "b"), member(9, 1, "a")],
        };
        let share = start.share_of(AgentId(8)).unwrap();
        assert_eq!((share.node, share.first_rank, share.world_size), (1, 2, 7));
        assert!(share.alone_on_host);
        let last = start.share_of(AgentId(9)).unwrap();
        assert_eq!((last.first_rank, last.alone_on_host), (6, false));
        assert_eq!(start.share_of(AgentId(1)), None);
    }

    #[test]
    fn the_exit_code_is_that_of_a_shell() {
        let failed = |end| {
            Outcome::Failed(Box::new(RankFailure {
                rank: 1,
                attempt: 0,
                host: "h".into(),
                pid: 5,
                end,
                stderr: vec![],
            }))
        };
        assert_eq!(Outcome::Success.exit_code(), 0);
        assert_eq!(failed(End::Code(3)).exit_code(), 3);
        assert_eq!(failed(End::Signal(9)).exit_code(), 137);
        assert_eq!(Outcome::Interrupted { signal: 2 }.exit_code(), 130);
        let text = failed(End::Signal(9)).to_string();
        assert!(
            text.starts_with("rank 1 failed first: killed by SIGKILL"),
            "{text}"
        );
        assert!(text.contains("nothing to stderr"), "{text}");
    }
}
