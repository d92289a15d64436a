use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::run::agent::{Action, Agent, Input};
use crate::run::message::{AgentId, RankFailure};

const SECOND: Duration = Duration::from_secs(1);

fn job(nnodes: usize, max_restarts: usize) -> Job {
    Job::new(Limits {
        nnodes,
        max_restarts,
        join: 60 * SECOND,
        silence: 10 * SECOND,
    })
}

fn say(job: &mut Job, node: usize, what: News) -> Vec<Command> {
    let agent = AgentId(node as u64);
    job.handle(Message { node, agent, what })
}

fn joined(nnodes: usize) -> News {
    News::Joined {
        nproc: NPROC,
        nnodes,
        host: "h".into(),
    }
}

fn failure(attempt: usize, end: End) -> News {
    News::Failed(vec![RankFailure {
        rank: 3,
        attempt,
        host: "h".into(),
        pid: 1,
        end,
        stderr: vec![],
    }])
}

/// Lets the moment pass in which other nodes may tell of failures.
fn settle(job: &mut Job) -> Vec<Command> {
    job.tick(job.now + SETTLING)
}

/// Two nodes that run attempt 0.
fn running(max_restarts: usize) -> Job {
    let mut job = job(2, max_restarts);
    assert_eq!(say(&mut job, 0, joined(2)), []);
    let commands = say(&mut job, 1, joined(2));
    assert!(matches!(&commands[..], [Command::Start(start)] if start.attempt == 0));
    job
}

#[test]
fn it_succeeds_when_every_node_has() {
    let mut job = running(0);
    assert_eq!(say(&mut job, 1, News::Succeeded { attempt: 0 }), []);
    let commands = say(&mut job, 0, News::Succeeded { attempt: 0 });
    assert_eq!(commands, [Command::Finish(Outcome::Success)]);
    assert!(!job.is_left());
    say(&mut job, 0, News::Left);
    say(&mut job, 1, News::Left);
    assert!(job.is_left());
}

#[test]
fn a_failure_restarts_all_until_the_limit_is_reached() {
    let mut job = running(1);
    assert_eq!(say(&mut job, 1, failure(0, End::Code(3))), []);
    let commands = settle(&mut job);
    let [Command::Stop(stop)] = &commands[..] else {
        panic!("{commands:?}");
    };
    assert_eq!(stop.restart, Some(Restart { number: 1, of: 1 }));
    // What follows from it does not count.
    assert_eq!(say(&mut job, 0, failure(0, End::Code(1))), []);
    assert_eq!(say(&mut job, 0, News::Stopped { attempt: 0 }), []);
    let commands = say(&mut job, 1, News::Stopped { attempt: 0 });
    assert!(matches!(&commands[..], [Command::Start(start)] if start.attempt == 1));

    say(&mut job, 0, failure(1, End::Code(4)));
    let commands = settle(&mut job);
    assert!(matches!(&commands[..], [Command::Stop(stop)] if stop.restart.is_none()));
    say(&mut job, 0, News::Stopped { attempt: 1 });
    let commands = say(&mut job, 1, News::Stopped { attempt: 1 });
    let [Command::Finish(outcome)] = &commands[..] else {
        panic!("{commands:?}");
    };
    assert_eq!(outcome.exit_code(), 4);
}

#[test]
fn the_culprit_is_named_whichever_node_speaks_first() {
    let mut job = running(0);
    say(&mut job, 0, failure(0, End::Code(1)));
    say(&mut job, 1, failure(0, End::Signal(9)));
    let commands = settle(&mut job);
    let [Command::Stop(stop)] = &commands[..] else {
        panic!("{commands:?}");
    };
    assert_eq!(stop.cause.exit_code(), 137);
}

#[test]
fn what_cannot_start_is_not_tried_again() {
    let mut job = running(5);
    let end = End::NotStarted {
        why: "no such program".into(),
        code: 127,
    };
    say(&mut job, 1, failure(0, end));
    let commands = settle(&mut job);
    assert!(matches!(&commands[..], [Command::Stop(stop)] if stop.restart.is_none()));
}

#[test]
fn a_silent_node_is_lost_and_the_others_end() {
    let mut job = running(0);
    assert_eq!(job.tick(9 * SECOND), []);
    say(&mut job, 1, News::Beat);
    assert_eq!(job.tick(19 * SECOND), []);
    let commands = job.tick(20 * SECOND);
    let [Command::Stop(stop)] = &commands[..] else {
        panic!("{commands:?}");
    };
    let text = stop.cause.to_string();
    assert!(text.contains("node 1 (host h) is lost"), "{text}");
    let commands = say(&mut job, 0, News::Stopped { attempt: 0 });
    assert!(matches!(
        &commands[..],
        [Command::Finish(Outcome::NodeLost { node: 1, .. })]
    ));
    say(&mut job, 0, News::Left);
    assert!(job.is_left(), "nobody waits for the lost one");
}

#[test]
fn a_lost_node_may_come_back_if_restarts_are_left() {
    let mut job = running(1);
    job.tick(11 * SECOND);
    let commands = say(&mut job, 0, News::Stopped { attempt: 0 });
    let [Command::Notice(text)] = &commands[..] else {
        panic!("{commands:?}");
    };
    assert!(text.contains("waiting for node 1"), "{text}");
    let agent = AgentId(77);
    let commands = job.handle(Message {
        node: 1,
        agent,
        what: joined(2),
    });
    let [Command::Start(start)] = &commands[..] else {
        panic!("{commands:?}");
    };
    assert_eq!((start.attempt, start.members[1].agent), (1, agent));
    // The old agent, should it still be there, is not heard any more.
    assert_eq!(say(&mut job, 1, failure(1, End::Code(1))), []);
    assert_eq!(say(&mut job, 1, News::Succeeded { attempt: 1 }), []);
}

#[test]
fn a_node_that_is_lost_while_others_stop_is_not_waited_for() {
    let mut job = running(0);
    say(&mut job, 0, failure(0, End::Code(3)));
    settle(&mut job);
    assert_eq!(say(&mut job, 0, News::Stopped { attempt: 0 }), []);
    let commands = job.tick(11 * SECOND);
    let [Command::Notice(text), Command::Finish(outcome)] = &commands[..] else {
        panic!("{commands:?}");
    };
    assert!(text.contains("node 1 (host h) is lost"), "{text}");
    assert_eq!(outcome.exit_code(), 3);
}

#[test]
fn nodes_that_do_not_come_are_named() {
    let mut job = job(3, 0);
    say(&mut job, 1, joined(3));
    say(&mut job, 0, joined(3));
    for at in 1..=12 {
        assert_eq!(job.tick(5 * at * SECOND), []);
        say(&mut job, 1, News::Beat);
    }
    let commands = job.tick(61 * SECOND);
    let [Command::Finish(outcome)] = &commands[..] else {
        panic!("{commands:?}");
    };
    let text = outcome.to_string();
    assert!(
        text.starts_with("node 2 did not join within 60 s"),
        "{text}"
    );
}

#[test]
fn a_second_agent_and_another_number_of_nodes_are_refused() {
    let mut job = job(2, 0);
    say(&mut job, 1, joined(2));
    let mut join = |node, nnodes| {
        let what = joined(nnodes);
        let agent = AgentId(99);
        match &job.handle(Message { node, agent, what })[..] {
            [Command::Refuse { why, .. }] => why.clone(),
            other => panic!("{other:?}"),
        }
    };
    assert!(join(1, 2).contains("--node-rank 1 is taken"));
    assert!(join(0, 3).contains("--nnodes 2"));
    assert!(join(5, 2).contains("--node-rank 5"));
}

#[test]
fn an_interrupt_ends_the_job_in_every_phase() {
    let end = Outcome::Interrupted { signal: 15 };
    let interrupt = News::Interrupted { signal: 15 };
    let mut gathering = job(2, 3);
    say(&mut gathering, 0, joined(2));
    assert_eq!(
        say(&mut gathering, 0, interrupt.clone()),
        [Command::Finish(end.clone())]
    );
    let mut job = running(3);
    let commands = say(&mut job, 1, interrupt.clone());
    assert!(matches!(&commands[..], [Command::Stop(stop)] if stop.restart.is_none()));
    let mut restarting = running(3);
    say(&mut restarting, 0, failure(0, End::Code(1)));
    settle(&mut restarting);
    say(&mut restarting, 1, interrupt);
    say(&mut restarting, 0, News::Stopped { attempt: 0 });
    let commands = say(&mut restarting, 1, News::Stopped { attempt: 0 });
    assert_eq!(commands, [Command::Finish(end)]);
}

/// A job of several nodes with messages under way, and ranks that end when the test says so.
struct World {
    job: Job,
    agents: Vec<Agent>,
    outcomes: Vec<Option<Outcome>>,
    /// Commands that a node has not read yet.
    commands: Vec<VecDeque<Command>>,
    inbox: VecDeque<Message>,
    /// (node, local) of ranks that run.
    ranks: Vec<(usize, usize)>,
    /// Nodes that wait for failures to settle.
    settling: Vec<usize>,
    most_ranks: usize,
}

const NPROC: usize = 2;

impl World {
    fn new(nnodes: usize, max_restarts: usize) -> Self {
        let agents = (0..nnodes).map(|node| Agent::new(AgentId(node as u64), "h".into()));
        let mut world = Self {
            job: job(nnodes, max_restarts),
            agents: agents.collect(),
            outcomes: vec![None; nnodes],
            commands: vec![VecDeque::new(); nnodes],
            inbox: VecDeque::new(),
            ranks: vec![],
            settling: vec![],
            most_ranks: 0,
        };
        for node in 0..nnodes {
            world.tell(node, joined(nnodes));
        }
        world
    }

    fn tell(&mut self, node: usize, what: News) {
        let agent = AgentId(node as u64);
        self.inbox.push_back(Message { node, agent, what });
    }

    fn input(&mut self, node: usize, input: Input) {
        for action in self.agents[node].handle(input) {
            match action {
                Action::Spawn(share) => {
                    let ranks = (0..share.nproc).map(|local| (node, local));
                    self.ranks.extend(ranks);
                    self.most_ranks = self.most_ranks.max(self.ranks.len());
                }
                Action::StartSettling => self.settling.push(node),
                Action::Tell(news) => self.tell(node, news),
                Action::Exit(outcome) => self.outcomes[node] = Some(outcome),
                // That ranks end is up to the test, with or without a signal.
                _ => {}
            }
        }
    }

    fn end_rank(&mut self, index: usize, end: End) {
        let (node, local) = self.ranks.swap_remove(index);
        let exited = Input::Exited {
            local,
            pid: 1,
            end,
            stderr: vec![],
        };
        self.input(node, exited);
    }

    fn publish(&mut self, commands: Vec<Command>) {
        for command in commands {
            for queue in &mut self.commands {
                queue.push_back(command.clone());
            }
        }
    }

    /// One step, chosen by a number. False if nothing is left to happen.
    fn step(&mut self, choice: usize, failures: &mut usize) -> bool {
        let nodes = self.agents.len();
        let kinds = nodes + 4;
        for kind in (0..kinds).map(|i| (choice + i) % kinds) {
            if kind < nodes
                && let Some(command) = self.commands[kind].pop_front()
            {
                self.input(kind, Input::Command(command));
                return true;
            }
            if kind == nodes
                && let Some(message) = self.inbox.pop_front()
            {
                let commands = self.job.handle(message);
                self.publish(commands);
                return true;
            }
            if kind == nodes + 1 && !self.ranks.is_empty() {
                let fails = choice.is_multiple_of(3) && *failures > 0;
                *failures -= usize::from(fails);
                let end = End::Code(if fails { 9 } else { 0 });
                self.end_rank(choice % self.ranks.len(), end);
                return true;
            }
            if kind == nodes + 2
                && let Some(node) = self.settling.pop()
            {
                self.input(node, Input::Settled);
                return true;
            }
            if kind == nodes + 3 && matches!(self.job.phase, Phase::Failing { .. }) {
                let commands = settle(&mut self.job);
                self.publish(commands);
                return true;
            }
        }
        false
    }
}

proptest! {
    #[test]
    fn in_whatever_order_things_happen_all_nodes_end_alike(
        nnodes in 1usize..4,
        max_restarts in 0usize..3,
        mut failures in 0usize..4,
        interrupt in prop::option::of((0usize..60, 0usize..3)),
        choices in prop::collection::vec(0usize..1000, 400),
    ) {
        let mut world = World::new(nnodes, max_restarts);
        for (i, choice) in choices.into_iter().enumerate() {
            if let Some((at, node)) = interrupt && at == i {
                world.input(node % nnodes, Input::Terminate(2));
            }
            if !world.step(choice, &mut failures) {
                break;
            }
        }
        // Whatever the choices were, the rest happens without further failures.
        while world.step(0, &mut 0) {}
        prop_assert_eq!(&world.ranks, &[]);
        prop_assert!(world.job.is_left());
        prop_assert!(world.most_ranks <= NPROC * nnodes, "two attempts ran at once");
        let outcomes: Vec<_> = world.outcomes.iter().flatten().collect();
        prop_assert_eq!(outcomes.len(), nnodes);
        if interrupt.is_none() {
            prop_assert!(outcomes.windows(2).all(|pair| pair[0] == pair[1]));
        }
    }
}
