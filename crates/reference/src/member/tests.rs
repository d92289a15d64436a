use std::sync::Weak;
use std::time::Instant;

use phalanx_pg::{Call, CallKind, Done, Engine, Fingerprint, Mode, Turn, group_identity};

use super::*;

/// A transport that loses everything but the farewell.
struct Recorded {
    member: Weak<Member>,
    farewell: Mutex<Option<Farewell>>,
}

impl Transport for Recorded {
    fn send(&self, _: usize, _: Label, _: Data, ticket: Option<Ticket>) {
        if let (Some(ticket), Some(member)) = (ticket, self.member.upgrade()) {
            member.sent(ticket);
        }
    }

    fn close(&self, farewell: Farewell) {
        self.farewell.lock().get_or_insert(farewell);
    }

    fn join(&self, _: Duration) {}
}

/// Rank 0 of three, and what it says last.
fn alone() -> (Arc<Member>, Arc<Recorded>) {
    let members = vec![0, 1, 2];
    let seat = Seat {
        name: "three".into(),
        identity: group_identity("", "three", &members),
        rank: 0,
        members,
        timeout: Duration::from_secs(30),
        parent: None,
    };
    let member = Member::new(&seat, 0);
    let transport = Arc::new(Recorded {
        member: Arc::downgrade(&member),
        farewell: Mutex::default(),
    });
    member.attach(Arc::clone(&transport) as Arc<dyn Transport>);
    (member, transport)
}

fn barrier(member: &Member, seq: u64) -> Result<Done> {
    let started = Instant::now();
    let turn = Turn {
        seq,
        kind: CallKind::Barrier,
        mode: Mode::Blocking,
        deadline: started + Duration::from_secs(30),
        started,
    };
    member.run(Call::Barrier, &turn)
}

/// Rank `from` has sent its part of barrier `seq`.
fn arrive(member: &Member, from: usize, seq: u64) {
    let data = Arc::new(Fingerprint::of(&Call::Barrier, seq).encode());
    member.deliver(from, Label::Collective { seq, part: 0 }, data);
}

/// What rank 2 says when it drops the group, and rank 1 when it has found that out.
fn dropped(origin: usize) -> Notice {
    let cause = Error::new(ErrorKind::Aborted, "rank 2 dropped the group");
    Notice::of(&cause.from_peer(2), origin)
}

#[test]
fn what_comes_from_others_after_a_rank_has_left_still_completes_its_operation() {
    for late in [1, 2] {
        let early = 3 - late;
        let (member, _) = alone();
        arrive(&member, early, 0);
        member.left(early, &dropped(early));
        std::thread::scope(|scope| {
            let running = scope.spawn(|| barrier(&member, 0));
            // It waits for the other by then, or will find everything there.
            std::thread::sleep(Duration::from_millis(10));
            arrive(&member, late, 0);
            member.left(late, &dropped(late));
            running.join().unwrap().unwrap();
        });
        let err = barrier(&member, 1).unwrap_err();
        assert_eq!((err.kind(), err.peer()), (ErrorKind::Aborted, Some(2)));
        assert_eq!(err.message(), "rank 2 dropped the group");
    }
}

#[test]
fn who_finds_that_a_rank_has_left_takes_nothing_back_from_the_others() {
    let (member, transport) = alone();
    member.left(2, &dropped(2));
    arrive(&member, 1, 0);
    let err = barrier(&member, 0).unwrap_err();
    member.interrupt(&err); // as the lane does
    let said = transport.farewell.lock().take().unwrap();
    let Farewell::Left(notice) = said else {
        panic!("{said:?}");
    };
    assert_eq!(notice.to_error().message(), "rank 2 dropped the group");
}

#[test]
fn an_abort_does_not_wait_for_what_was_sent_before() {
    let (member, transport) = alone();
    let abort = Error::new(ErrorKind::Aborted, "enough");
    member.told(&Notice::of(&abort, 2));
    arrive(&member, 1, 0);
    arrive(&member, 2, 0);
    let err = barrier(&member, 0).unwrap_err();
    assert_eq!(err.message(), "rank 2 aborted the group: enough");
    let said = transport.farewell.lock().take().unwrap();
    assert!(matches!(said, Farewell::Abort(_)), "{said:?}");
}

#[test]
fn a_rank_that_died_fails_only_what_needs_it() {
    let (member, _) = alone();
    arrive(&member, 2, 0);
    member.lost(2, "its connection closed");
    std::thread::scope(|scope| {
        let running = scope.spawn(|| barrier(&member, 0));
        arrive(&member, 1, 0);
        running.join().unwrap().unwrap();
    });
    let err = barrier(&member, 1).unwrap_err();
    assert_eq!((err.kind(), err.peer()), (ErrorKind::PeerLost, Some(2)));
}
