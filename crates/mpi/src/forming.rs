//! How a group is formed: its ranks agree first, then MPI makes the communicators.
//!
//! MPI makes a communicator only when all members call for it, and whoever is inside cannot leave.
//! So every member first tells all others that it is here; when the first member has heard them all
//! it asks whether they still are, and when all have said yes it says go, upon which they enter
//! MPI. A rank that gives up says so, and no yes. If it has said yes before, it may be let go all
//! the same, and then a thread that nobody waits for does its part: all enter, or none.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use phalanx_pg::{Error, ErrorKind, Result, group_identity};

use crate::comm::Comm;
use crate::flight::take;
use crate::library::{Unfinished, library};
use crate::member::{FORMING, Member, Needs};

/// What members of a group to be say to each other; behind it comes the group.
const HERE: u8 = 1;
const GONE: u8 = 2;
const ASK: u8 = 3;
const YES: u8 = 4;
const GO: u8 = 5;

/// Between two looks at what the others say.
const GLANCE: Duration = Duration::from_millis(5);
/// Between those of a thread that nobody waits for.
const WITHOUT_CALLER: Duration = Duration::from_millis(1);

/// What those are told who then meet in the group without it.
const GAVE_UP: &str = "gave up before the group was formed";

/// Groups that are not formed yet.
#[derive(Default)]
pub(crate) struct Forming(Mutex<State>);

#[derive(Default)]
struct State {
    /// By the identity of the group.
    heard: HashMap<u64, Heard>,
    /// The communicator is given up: nothing more can be heard.
    closed: bool,
}

#[derive(Default)]
struct Heard {
    here: HashSet<usize>,
    gone: HashSet<usize>,
    /// By the first member alone.
    yes: HashSet<usize>,
    /// By the others.
    asked: bool,
    go: bool,
}

impl Forming {
    /// Nobody listens after this.
    pub(crate) fn close(&self) {
        self.0.lock().closed = true;
    }
}

/// A group to be.
#[derive(Debug, Clone)]
struct Plan {
    identity: u64,
    /// The members' ranks in the group that it is split from.
    ranks: Vec<usize>,
    name: String,
}

impl Member {
    /// The group of all processes that were started together. A collective call.
    pub(crate) fn world(name: &str, timeout: Duration) -> Result<Arc<Self>> {
        // MPI wants to be started and ended by the same thread.
        library()?;
        let name = name.to_owned();
        let make = move || {
            let comm = Comm::world()?;
            let members = (0..comm.size()).collect();
            Self::new(comm, &name, members, timeout)
        };
        let late = format!(
            "not all processes came to form a group of all within {:.1} s; do all of them do so?",
            timeout.as_secs_f64()
        );
        apart(make, deadline_after(timeout), &late, || Ok(()))
    }

    /// A group of some ranks of this one. A collective call of these.
    pub(crate) fn split(self: &Arc<Self>, ranks: &[usize], name: &str) -> Result<Arc<Self>> {
        let plan = Plan {
            identity: hash(&group_identity("", name, ranks)),
            ranks: ranks.to_vec(),
            name: name.to_owned(),
        };
        let deadline = deadline_after(self.timeout());
        let mut promised = false;
        if let Err(err) = self.agree(&plan, deadline, &mut promised) {
            self.take_back(plan, promised);
            return Err(err);
        }
        let late = format!(
            "ranks {ranks:?} have come, but MPI has not made the group within {:.1} s",
            self.timeout().as_secs_f64()
        );
        let parent = Arc::clone(self);
        let members = plan.ranks.clone();
        let make = move || parent.make(&plan);
        let made = apart(make, deadline, &late, || {
            self.look_around(Needs::Only(&members))
        });
        if let Err(err) = &made
            && err.kind() == ErrorKind::Timeout
        {
            // It is inside MPI and cannot leave; the others need not wait for their own limits.
            self.fail(err.clone());
        }
        made
    }

    /// Returns when all members are here and enter MPI. `promised` is whether this one has said
    /// that it will.
    fn agree(&self, plan: &Plan, deadline: Instant, promised: &mut bool) -> Result<()> {
        self.tell_members(plan, HERE);
        let leads = plan.ranks[0] == self.rank();
        let ready = |promised: &mut bool| -> Result<bool> {
            self.hear()?;
            match leads {
                true => Ok(self.lead(plan, promised)),
                false => Ok(self.follow(plan, promised)),
            }
        };
        let needs = Needs::Only(&plan.ranks);
        self.poll(needs, deadline, promised, ready, |_| self.absent(plan))?;
        if leads {
            self.tell_members(plan, GO);
        }
        self.forming().0.lock().heard.remove(&plan.identity);
        Ok(())
    }

    /// Whether the first member may let all go.
    fn lead(&self, plan: &Plan, asked: &mut bool) -> bool {
        let missing = |among: fn(&Heard) -> &HashSet<usize>| self.missing(plan, among);
        if !*asked && missing(|heard| &heard.here).is_empty() {
            self.tell_members(plan, ASK);
            *asked = true;
        }
        *asked && missing(|heard| &heard.yes).is_empty()
    }

    /// Whether another member is let go.
    fn follow(&self, plan: &Plan, promised: &mut bool) -> bool {
        let (asked, go) = self.heard(plan, |heard| (heard.asked, heard.go));
        if asked && !*promised {
            self.tell(plan, plan.ranks[0], YES);
            *promised = true;
        }
        go
    }

    fn heard<T>(&self, plan: &Plan, look: impl FnOnce(&Heard) -> T) -> T {
        let mut forming = self.forming().0.lock();
        look(forming.heard.entry(plan.identity).or_default())
    }

    /// The other members that have not said something.
    fn missing(&self, plan: &Plan, among: impl Fn(&Heard) -> &HashSet<usize>) -> Vec<usize> {
        let mut others = plan.ranks.to_vec();
        others.retain(|&rank| rank != self.rank());
        self.heard(plan, |heard| {
            others.retain(|rank| !among(heard).contains(rank))
        });
        others
    }

    fn absent(&self, plan: &Plan) -> Error {
        let mut missing = self.missing(plan, |heard| &heard.here);
        let never_came = self.missing(plan, |heard| &heard.gone);
        // Some may only have given up a moment before this one, for want of the others.
        if missing.iter().any(|rank| never_came.contains(rank)) {
            missing.retain(|rank| never_came.contains(rank));
        }
        if missing.is_empty() {
            missing = match plan.ranks[0] {
                first if first == self.rank() => self.missing(plan, |heard| &heard.yes),
                first => vec![first],
            };
        }
        let did = format!(
            "did not join within {:.1} s; do all ranks form the same groups?",
            self.timeout().as_secs_f64()
        );
        Error::of_ranks(ErrorKind::Timeout, &missing, &did)
    }

    fn tell(&self, plan: &Plan, peer: usize, kind: u8) {
        let message = [&[kind][..], &plan.identity.to_le_bytes()].concat();
        self.say(peer, FORMING, message);
    }

    fn tell_members(&self, plan: &Plan, kind: u8) {
        for &peer in plan.ranks.iter().filter(|&&rank| rank != self.rank()) {
            self.tell(plan, peer, kind);
        }
    }

    /// Takes in what has been said, in the order in which each rank said it.
    fn hear(&self) -> Result<()> {
        let mut forming = self.forming().0.lock();
        if forming.closed {
            return Err(Error::new(ErrorKind::Closed, "the group is shut down"));
        }
        while let Some((from, bytes)) = take(self.control(), FORMING)? {
            let Some((&kind, identity)) = bytes.split_first() else {
                continue;
            };
            let Ok(identity) = identity.try_into() else {
                continue;
            };
            let identity = u64::from_le_bytes(identity);
            let heard = forming.heard.entry(identity).or_default();
            match kind {
                HERE => drop(heard.here.insert(from)),
                GONE => {
                    heard.here.remove(&from);
                    heard.gone.insert(from);
                }
                ASK => heard.asked = true,
                YES => drop(heard.yes.insert(from)),
                _ => heard.go = true,
            }
        }
        Ok(())
    }

    /// Gives up. After a promise this rank may be let go at the same moment, so for a while a
    /// thread stands ready.
    fn take_back(self: &Arc<Self>, plan: Plan, promised: bool) {
        self.tell_members(&plan, GONE);
        if !promised || plan.ranks[0] == self.rank() {
            return;
        }
        let (member, unfinished) = (Arc::clone(self), Unfinished::new());
        let stand_by = move || {
            let _unfinished = unfinished;
            let end = deadline_after(member.timeout());
            while Instant::now() < end && member.hear().is_ok() {
                if member.heard(&plan, |heard| heard.go) {
                    let _ = member.make(&plan).map(|made| made.leave(GAVE_UP));
                    return;
                }
                std::thread::sleep(WITHOUT_CALLER);
            }
        };
        let thread = std::thread::Builder::new().name("phalanx-mpi-rest".into());
        if let Err(err) = thread.spawn(stand_by) {
            tracing::warn!(target: "phalanx::mpi", "others may wait: starting a thread: {err}");
        }
    }

    /// All members are on their way to this.
    fn make(&self, plan: &Plan) -> Result<Arc<Self>> {
        // Not a tag of messages; it tells groups apart that are made at the same time.
        let tag = i32::try_from(plan.identity & 0x7fff).unwrap_or(0);
        let comm = self.comm().of(&plan.ranks, tag)?;
        let members = plan.ranks.iter().map(|&rank| self.members()[rank]);
        let group = self.place().group.as_deref().unwrap_or_default();
        let name = format!("{group}/{}", plan.name);
        Self::new(comm, &name, members.collect(), self.timeout())
    }
}

fn deadline_after(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(Duration::from_secs(1 << 30))
}

/// The same on all ranks.
fn hash(name: &str) -> u64 {
    // FNV-1a.
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

/// What becomes of a call in a thread of its own.
#[derive(Default)]
struct Fate {
    made: Option<Result<Arc<Member>>>,
    abandoned: bool,
}

/// Makes a group in a thread of its own, which may never come back from MPI, and waits for it until
/// the deadline, or until `glance` finds that there is nothing to wait for. Who comes too late
/// leaves the group that was made.
fn apart(
    make: impl FnOnce() -> Result<Arc<Member>> + Send + 'static,
    deadline: Instant,
    late: &str,
    glance: impl Fn() -> Result<()>,
) -> Result<Arc<Member>> {
    let shared = Arc::new((Mutex::new(Fate::default()), Condvar::new()));
    let (theirs, unfinished) = (Arc::clone(&shared), Unfinished::new());
    let run = move || {
        let _unfinished = unfinished;
        let made = make();
        let (fate, changed) = &*theirs;
        let mut fate = fate.lock();
        if fate.abandoned {
            drop(fate);
            let _ = made.map(|made| made.leave(GAVE_UP));
            return;
        }
        fate.made = Some(made);
        changed.notify_all();
    };
    let thread = std::thread::Builder::new().name("phalanx-mpi-form".into());
    let spawned = thread.spawn(run);
    spawned.map_err(|err| Error::new(ErrorKind::Backend, format!("starting a thread: {err}")))?;
    let (fate, changed) = &*shared;
    loop {
        let looked = glance();
        let mut fate = fate.lock();
        if fate.made.is_none() && looked.is_ok() {
            changed.wait_until(&mut fate, deadline.min(Instant::now() + GLANCE));
        }
        if let Some(made) = fate.made.take() {
            return made;
        }
        fate.abandoned = looked.is_err() || Instant::now() >= deadline;
        if fate.abandoned {
            return looked.and(Err(Error::new(ErrorKind::Timeout, late)));
        }
    }
}
