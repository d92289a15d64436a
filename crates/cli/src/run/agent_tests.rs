use super::*;
use crate::run::message::{Member, Start};
use signal_hook::consts::{SIGINT, SIGUSR1};

const ME: AgentId = AgentId(7);

fn start(attempt: usize, nproc: usize) -> Input {
    let member = |id, nproc| Member {
        agent: AgentId(id),
        nproc,
        host: format!("host{id}"),
    };
    Input::Command(Command::Start(Start {
        attempt,
        store_port: 4711,
        members: vec![member(1, 2), member(ME.0, nproc)],
    }))
}

fn exited(local: usize, end: End) -> Input {
    Input::Exited {
        local,
        pid: 100,
        end,
        stderr: vec!["last words".into()],
    }
}

fn stop(attempt: usize) -> Stop {
    Stop {
        attempt,
        cause: Outcome::Interrupted { signal: 2 },
        restart: None,
    }
}

fn idle() -> Agent {
    Agent::new(ME, "here".into())
}

fn running(nproc: usize) -> Agent {
    let mut agent = idle();
    let actions = agent.handle(start(0, nproc));
    assert!(matches!(actions[..], [Action::Spawn(share)] if share.first_rank == 2));
    agent
}

fn signal(locals: &[usize], signal: i32) -> Action {
    Action::Signal {
        locals: locals.to_vec(),
        signal,
    }
}

#[test]
fn it_succeeds_when_all_ranks_have() {
    let mut agent = running(2);
    assert_eq!(agent.handle(exited(1, End::Code(0))), []);
    let told = Action::Tell(News::Succeeded { attempt: 0 });
    assert_eq!(agent.handle(exited(0, End::Code(0))), [told]);
    let actions = agent.handle(Input::Command(Command::Finish(Outcome::Success)));
    assert_eq!(
        actions,
        [Action::Tell(News::Left), Action::Exit(Outcome::Success)]
    );
}

#[test]
fn the_first_failure_stops_the_others_and_the_grace_period_ends_them() {
    let mut agent = running(4);
    let actions = agent.handle(exited(1, End::Signal(11)));
    assert_eq!(actions, [Action::StartSettling]);
    assert_eq!(agent.handle(exited(3, End::Code(1))), []);
    let actions = agent.handle(Input::Settled);
    let [Action::Tell(News::Failed(failures)), rest @ ..] = &actions[..] else {
        panic!("{actions:?}");
    };
    let ranks: Vec<usize> = failures.iter().map(|failure| failure.rank).collect();
    assert_eq!(ranks, [3, 5], "in the order in which they ended");
    assert_eq!(failures[0].end, End::Signal(11));
    assert_eq!(failures[0].stderr, ["last words"]);
    assert_eq!(rest, [signal(&[0, 2], SIGTERM), Action::StartGrace]);
    // What the others die of is not a failure of theirs.
    assert_eq!(agent.handle(exited(0, End::Signal(15))), []);
    assert_eq!(agent.handle(Input::GraceOver), [signal(&[2], SIGKILL)]);
    let told = Action::Tell(News::Stopped { attempt: 0 });
    assert_eq!(agent.handle(exited(2, End::Signal(9))), [told]);
    assert!(matches!(
        agent.handle(start(1, 4))[..],
        [Action::Spawn(Share { attempt: 1, .. })]
    ));
}

#[test]
fn a_rank_that_others_blame_has_more_time_but_not_for_ever() {
    let mut agent = running(3);
    agent.handle(Input::Exited {
        local: 0,
        pid: 1,
        end: End::Code(1),
        stderr: vec!["closed (peer: rank 4)".into()],
    });
    for _ in 0..PATIENCE {
        assert_eq!(agent.handle(Input::Settled), [Action::StartSettling]);
    }
    let actions = agent.handle(Input::Settled);
    assert!(
        matches!(actions[0], Action::Tell(News::Failed(_))),
        "{actions:?}"
    );
}

#[test]
fn nobody_waits_for_failures_when_nobody_is_left_or_somebody_decides() {
    let mut agent = running(2);
    agent.handle(exited(0, End::Code(1)));
    let actions = agent.handle(exited(1, End::Code(2)));
    let [Action::Tell(News::Failed(failures)), Action::Tell(stopped)] = &actions[..] else {
        panic!("{actions:?}");
    };
    assert_eq!(
        (failures.len(), stopped),
        (2, &News::Stopped { attempt: 0 })
    );
    assert_eq!(agent.handle(Input::Settled), []);

    let mut interrupted = running(2);
    interrupted.handle(exited(0, End::Code(1)));
    let told = Action::Tell(News::Interrupted { signal: SIGINT });
    assert_eq!(
        interrupted.handle(Input::Terminate(SIGINT)),
        [told, signal(&[1], SIGINT), Action::StartGrace]
    );

    let mut stopped = running(2);
    stopped.handle(exited(0, End::Code(1)));
    let actions = stopped.handle(Input::Command(Command::Stop(stop(0))));
    assert!(actions.contains(&signal(&[1], SIGTERM)), "{actions:?}");
}

#[test]
fn a_stop_reaches_nodes_that_run_and_those_that_are_done() {
    let mut agent = running(1);
    let actions = agent.handle(Input::Command(Command::Stop(stop(0))));
    let expected = [
        Action::Report(stop(0)),
        signal(&[0], SIGTERM),
        Action::StartGrace,
    ];
    assert_eq!(actions, expected);

    let mut done = running(1);
    done.handle(exited(0, End::Code(0)));
    let actions = done.handle(Input::Command(Command::Stop(stop(0))));
    let told = Action::Tell(News::Stopped { attempt: 0 });
    assert_eq!(actions, [Action::Report(stop(0)), told]);
}

#[test]
fn a_newcomer_is_not_moved_by_what_was_before_its_time() {
    let mut agent = idle();
    let others = Input::Command(Command::Start(Start {
        attempt: 0,
        store_port: 4711,
        members: vec![],
    }));
    assert_eq!(agent.handle(others), []);
    assert_eq!(agent.handle(Input::Command(Command::Stop(stop(0)))), []);
    let refused = |id| {
        Input::Command(Command::Refuse {
            agent: AgentId(id),
            why: "taken".into(),
        })
    };
    assert_eq!(agent.handle(refused(1)), []);
    let end = Outcome::Stranded {
        why: "taken".into(),
    };
    assert_eq!(
        agent.handle(refused(ME.0)),
        [Action::Tell(News::Left), Action::Exit(end)]
    );
}

#[test]
fn an_interrupt_is_passed_on_and_a_second_one_kills() {
    let mut agent = running(2);
    let told = Action::Tell(News::Interrupted { signal: SIGINT });
    assert_eq!(
        agent.handle(Input::Terminate(SIGINT)),
        [told, signal(&[0, 1], SIGINT), Action::StartGrace]
    );
    let told = Action::Tell(News::Interrupted { signal: SIGINT });
    assert_eq!(
        agent.handle(Input::Terminate(SIGINT)),
        [told, signal(&[0, 1], SIGKILL)]
    );
}

#[test]
fn an_interrupt_while_ranks_are_stopped_for_a_restart_is_not_lost() {
    let mut agent = running(2);
    agent.handle(exited(0, End::Code(1)));
    agent.handle(Input::Settled);
    let told = Action::Tell(News::Interrupted { signal: SIGINT });
    assert!(agent.handle(Input::Terminate(SIGINT)).contains(&told));
}

#[test]
fn other_signals_go_to_the_ranks_that_run() {
    let mut agent = running(2);
    agent.handle(exited(0, End::Code(0)));
    let to = Action::SignalLeaders {
        locals: vec![1],
        signal: SIGUSR1,
    };
    assert_eq!(agent.handle(Input::Forward(SIGUSR1)), [to]);
    assert_eq!(idle().handle(Input::Forward(SIGUSR1)), []);
}

#[test]
fn without_the_coordinator_the_ranks_are_ended_and_then_the_agent() {
    let mut agent = running(1);
    let lost = agent.handle(Input::LinkLost("node 0 is lost".into()));
    assert_eq!(lost, [signal(&[0], SIGTERM), Action::StartGrace]);
    let actions = agent.handle(exited(0, End::Signal(15)));
    let Some(Action::Exit(outcome)) = actions.last() else {
        panic!("{actions:?}");
    };
    assert_eq!(outcome.exit_code(), 1);
    assert_eq!(outcome.to_string(), "node 0 is lost");
    assert_eq!(agent.handle(start(1, 1)), []);
}
