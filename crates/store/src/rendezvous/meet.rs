//! The meeting itself: every rank registers, and all learn the same outcome.
//!
//! All keys are below `phalanx/run_{id}/`, or `phalanx/` without a run id. A store may be older
//! than the job: torchrun restarts workers on the server that holds the keys of the attempt before.
//!
//! | key | value |
//! |---|---|
//! | `attempt` | the newest attempt that any rank came with |
//! | `attempt_{n}/round_{k}/world` | the world size, and who said so first |
//! | `attempt_{n}/round_{k}/rank_{r}` | which process is rank r |
//! | `attempt_{n}/round_{k}/arrived` | how many ranks have registered |
//! | `attempt_{n}/round_{k}/verdict` | the outcome: `ok`, `moved`, or `failed` and why. Written once |
//! | `attempt_{n}/round_{k}/heard` | how many ranks have read that it failed |
//! | `attempt_{n}/round_{k}/world_{w}/...` | the job's own keys |
//!
//! *Attempts* differ between the hosts of a job: torchrun counts per host, and a host whose workers
//! were healthy restarts them without counting. So the newest attempt holds for all, and those who
//! wait in an older one move there. *Rounds* tell apart what has the same attempt, such as a change
//! of membership: a round whose verdict is `ok` is over. A round that was left unfinished by
//! processes that are gone is not taken up again, as it cannot be known who will still come; it
//! fails, and the launcher counts a new attempt.

use std::sync::Arc;
use std::time::Duration;

use super::host::Identity;
use crate::deadline::Deadline;
use crate::error::{Result, StoreError};
use crate::store::Store;

/// One rank at the door.
#[derive(Debug, Clone)]
pub(super) struct Guest {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) attempt: usize,
    pub(super) run_id: Option<String>,
    pub(super) who: Identity,
    /// How long the ranks wait for each other, for the error that they did not come.
    pub(super) limit: Duration,
    /// Whether the store is younger than the job, being served by its rank 0.
    pub(super) fresh_store: bool,
    /// Whether this process serves the store, so that it has to leave last.
    pub(super) serves: bool,
    /// What all ranks must have been started with alike, for the error about a missing one.
    pub(super) shared: &'static str,
}

/// More rounds in one attempt than any job goes through.
const MAX_ROUNDS: usize = 10_000;
/// How long the rank that serves the store waits for others to read why the meeting failed.
const LINGER: Duration = Duration::from_secs(2);
/// Keys asked for at once when looking for missing ranks.
const CHUNK: usize = 64;

const FOREIGN_KEYS: &str = "another program uses the same keys of this store";

/// Why the ranks did not meet in a store.
#[derive(Debug)]
pub(super) enum NotMet {
    /// It is not the store of this meeting but of an earlier one that is about to close, or it
    /// closed before this rank had registered. The right one may be at the same address soon.
    Elsewhere(StoreError),
    /// They will not.
    Failed(StoreError),
}

impl From<StoreError> for NotMet {
    fn from(err: StoreError) -> Self {
        Self::Failed(err)
    }
}

/// Waits for all ranks; returns the prefix of the keys that only they use.
pub(super) fn meet(
    store: &Arc<dyn Store>,
    guest: &Guest,
    deadline: Deadline,
) -> Result<String, NotMet> {
    let root = match &guest.run_id {
        Some(id) => format!("phalanx/run_{id}"),
        None => "phalanx".to_owned(),
    };
    let meeting = Meeting {
        store: store.as_ref(),
        guest,
        deadline,
    };
    loop {
        let attempt = meeting.newest_attempt(&root);
        let attempt = attempt.map_err(|err| meeting.closed_early(err))?;
        if attempt != guest.attempt {
            tracing::info!(own = guest.attempt, attempt, "others are further on");
        }
        if let Some(round) = meeting.join_attempt(&attempt_root(&root, attempt))? {
            return Ok(round.key(&format!("world_{}", guest.world_size)));
        }
        if deadline.passed() {
            return Err(NotMet::Failed(StoreError::Rendezvous(format!(
                "the ranks did not settle on one attempt within {}; do all hosts run the same job?",
                time_text(guest.limit)
            ))));
        }
    }
}

fn attempt_root(root: &str, attempt: usize) -> String {
    format!("{root}/attempt_{attempt}")
}

struct Round {
    root: String,
}

impl Round {
    fn new(attempt_root: &str, number: usize) -> Self {
        Self {
            root: format!("{attempt_root}/round_{number}"),
        }
    }

    fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.root)
    }

    fn rank(&self, rank: usize) -> String {
        self.key(&format!("rank_{rank}"))
    }
}

/// How a round ended.
enum Verdict {
    Met,
    /// A newer attempt has begun.
    Moved,
    Failed(String),
}

impl Verdict {
    fn to_wire(&self) -> String {
        match self {
            Self::Met => "ok".to_owned(),
            Self::Moved => "moved".to_owned(),
            Self::Failed(why) => format!("failed {why}"),
        }
    }

    fn from_wire(bytes: &[u8]) -> Self {
        match String::from_utf8_lossy(bytes).split_once(' ') {
            None if bytes == b"ok" => Self::Met,
            None if bytes == b"moved" => Self::Moved,
            Some(("failed", why)) => Self::Failed(why.to_owned()),
            _ => Self::Failed(FOREIGN_KEYS.to_owned()),
        }
    }
}

struct Meeting<'a> {
    store: &'a dyn Store,
    guest: &'a Guest,
    deadline: Deadline,
}

impl Meeting<'_> {
    /// The newest attempt anyone came with, this rank included.
    fn newest_attempt(&self, root: &str) -> Result<usize> {
        let key = format!("{root}/attempt");
        let mine = self.guest.attempt;
        let wire = mine.to_string().into_bytes();
        let mut known = self.store.compare_set(&key, b"", &wire)?;
        loop {
            let text = String::from_utf8_lossy(&known).into_owned();
            let newest: usize = text.parse().map_err(|_| {
                StoreError::Rendezvous(format!(
                    "the store's key {key:?} holds {text:?}, not a number; is it shared with \
                     another program?"
                ))
            })?;
            if newest >= mine {
                return Ok(newest);
            }
            if self.deadline.passed() {
                return Err(StoreError::Rendezvous(format!(
                    "could not announce attempt {mine} in time, others change {key:?} all the time"
                )));
            }
            let now = self.store.compare_set(&key, &known, &wire)?;
            if now == wire {
                self.end_open_round(&attempt_root(root, newest))?;
                return Ok(mine);
            }
            known = now;
        }
    }

    /// Tells those who wait in an older attempt.
    fn end_open_round(&self, attempt_root: &str) -> Result<()> {
        for number in 0..MAX_ROUNDS {
            let round = Round::new(attempt_root, number);
            if !self.store.check(&[&round.key("verdict")])? {
                self.decide(&round, &Verdict::Moved)?;
                break;
            }
        }
        Ok(())
    }

    /// Meets in the first round that is not over. `None`: a newer attempt has begun.
    fn join_attempt(&self, attempt_root: &str) -> Result<Option<Round>, NotMet> {
        for number in 0..MAX_ROUNDS {
            let round = Round::new(attempt_root, number);
            let known = self.verdict_now(&round);
            let verdict = match known.map_err(|err| self.closed_early(err))? {
                None => self.join(&round)?,
                Some(Verdict::Met) => {
                    let again = self.may_meet_again(&round);
                    again.map_err(|err| self.closed_early(err))?;
                    if self.guest.fresh_store {
                        return Err(NotMet::Elsewhere(self.still_open()));
                    }
                    continue;
                }
                Some(Verdict::Failed(why)) => {
                    let Guest { rank, who, .. } = self.guest;
                    // Only a store that outlives its processes can hold what others left.
                    let hint = match self.guest.fresh_store {
                        true => "",
                        false => {
                            " (if an earlier job left this behind: end its processes, and start \
                             with another store, file or run id)"
                        }
                    };
                    Verdict::Failed(format!(
                        "the ranks gave up before rank {rank} ({who}) joined: {why}{hint}"
                    ))
                }
                Some(Verdict::Moved) => Verdict::Moved,
            };
            return match verdict {
                Verdict::Met => Ok(Some(round)),
                Verdict::Moved => Ok(None),
                Verdict::Failed(why) => Err(NotMet::Failed(self.give_up(&round, why))),
            };
        }
        Err(NotMet::Failed(StoreError::Rendezvous(format!(
            "{MAX_ROUNDS} meetings were held below {attempt_root:?} already; restart the store"
        ))))
    }

    /// What an error means for a rank that has not registered yet: a store that rank 0 serves for
    /// one meeting may have been that of the meeting before, whose last guest has just left.
    fn closed_early(&self, err: StoreError) -> NotMet {
        match err {
            StoreError::Connection { .. } if self.guest.fresh_store && !self.guest.serves => {
                NotMet::Elsewhere(err)
            }
            other => NotMet::Failed(other),
        }
    }

    /// Rank 0 serves one store per meeting, and this one's is over.
    fn still_open(&self) -> StoreError {
        StoreError::Rendezvous(format!(
            "rank 0 still serves the store of the meeting before and did not open a new one \
             within {}; has it shut its group down and dropped it?",
            time_text(self.guest.limit)
        ))
    }

    fn verdict_now(&self, round: &Round) -> Result<Option<Verdict>> {
        let key = round.key("verdict");
        if !self.store.check(&[&key])? {
            return Ok(None);
        }
        let verdict = self.store.get_for(&key, self.deadline.left())?;
        Ok(Some(Verdict::from_wire(&verdict)))
    }

    /// After a meeting that went well: is this another one, or a second process of one rank?
    fn may_meet_again(&self, round: &Round) -> Result<()> {
        let guest = self.guest;
        let key = round.rank(guest.rank);
        let holder = match self.store.check(&[&key])? {
            true => Identity::from_wire(&self.store.get_for(&key, self.deadline.left())?),
            false => None,
        };
        match holder {
            Some(holder) if holder.is_same_process(&guest.who) => Ok(()),
            Some(holder) if guest.fresh_store || holder.is_running() == Some(true) => {
                Err(StoreError::Rendezvous(self.twice(&holder)))
            }
            None if guest.fresh_store => Err(StoreError::Rendezvous(format!(
                "the ranks have met already, without rank {} ({}); start all ranks together and \
                 with the same {}",
                guest.rank, guest.who, guest.shared
            ))),
            _ => Ok(()),
        }
    }

    fn twice(&self, holder: &Identity) -> String {
        let Guest { rank, who, .. } = self.guest;
        let gone = match holder.is_running() {
            Some(false) => {
                "; the first is gone, so its keys are left over from an earlier start, which \
                 needs a fresh file or run id"
            }
            _ => "; give each process its own rank",
        };
        format!("rank {rank} was started twice: {holder} and {who}{gone}")
    }

    /// Registers, then waits for the verdict.
    fn join(&self, round: &Round) -> Result<Verdict> {
        if let Some(disagreement) = self.world_differs(round)? {
            return self.fail(round, disagreement);
        }
        let mine = self.guest.who.to_wire();
        let holder = self
            .store
            .compare_set(&round.rank(self.guest.rank), b"", mine.as_bytes())?;
        if holder != mine.as_bytes() {
            let why = match Identity::from_wire(&holder) {
                Some(holder) => self.twice(&holder),
                None => FOREIGN_KEYS.to_owned(),
            };
            return self.fail(round, why);
        }
        let arrived = self.store.add(&round.key("arrived"), 1)?;
        if usize::try_from(arrived).is_ok_and(|arrived| arrived >= self.guest.world_size) {
            self.decide(round, &Verdict::Met)?;
        }
        let verdict = round.key("verdict");
        match self.store.get_for(&verdict, self.deadline.left()) {
            Err(StoreError::Timeout { .. }) => self.overdue(round),
            other => Ok(Verdict::from_wire(&other?)),
        }
    }

    fn world_differs(&self, round: &Round) -> Result<Option<String>> {
        let Guest {
            rank,
            world_size,
            who,
            ..
        } = self.guest;
        let mine = format!("{world_size} rank {rank} ({who})");
        let said = self
            .store
            .compare_set(&round.key("world"), b"", mine.as_bytes())?;
        let said = String::from_utf8_lossy(&said);
        let (size, first) = said.split_once(' ').unwrap_or((&said, "another process"));
        let differs = size != world_size.to_string();
        Ok(differs.then(|| {
            format!(
                "the ranks disagree about the world size: {first} has {size}, rank {rank} ({who}) \
                 has {world_size}; start all with the same WORLD_SIZE"
            )
        }))
    }

    /// Makes the round fail for everyone, and for this rank also if the others have met.
    fn fail(&self, round: &Round, why: String) -> Result<Verdict> {
        match self.decide(round, &Verdict::Failed(why.clone()))? {
            Verdict::Moved => Ok(Verdict::Moved),
            _ => Ok(Verdict::Failed(why)),
        }
    }

    /// The error of a failed round, once those who need this process have read the verdict.
    fn give_up(&self, round: &Round, why: String) -> StoreError {
        // What matters is the reason; that the store is gone too, if it is, adds nothing.
        let _ = self.store.add(&round.key("heard"), 1);
        if self.guest.serves {
            self.linger(round);
        }
        StoreError::Rendezvous(why)
    }

    /// Gives the verdict, or learns that there is one.
    fn decide(&self, round: &Round, verdict: &Verdict) -> Result<Verdict> {
        let (key, text) = (round.key("verdict"), verdict.to_wire());
        let stands = self.store.compare_set(&key, b"", text.as_bytes())?;
        if stands == text.as_bytes() {
            // PyTorch's legacy server wakes nobody on compare_set.
            self.store.set(&key, text.as_bytes())?;
            // A `set` is not acknowledged; the answer to this is.
            self.store.check(&[&key])?;
        }
        Ok(Verdict::from_wire(&stands))
    }

    /// Time is up: who is missing?
    fn overdue(&self, round: &Round) -> Result<Verdict> {
        let (mut joined, mut missing) = (Vec::new(), Vec::new());
        let ranks: Vec<usize> = (0..self.guest.world_size).collect();
        for chunk in ranks.chunks(CHUNK) {
            if self.are_here(round, chunk)? {
                joined.extend(chunk);
                continue;
            }
            for rank in chunk {
                match self.are_here(round, &[*rank])? {
                    true => joined.push(*rank),
                    false => missing.push(*rank),
                }
            }
        }
        if missing.is_empty() {
            // The last one came just now, or died between registering and counting itself.
            return self.decide(round, &Verdict::Met);
        }
        let (noun, is_it) = match missing.len() {
            1 => ("rank", "is it"),
            _ => ("ranks", "are they"),
        };
        let why = format!(
            "{noun} {} did not join within {} (joined: {}); {is_it} started with the same {}?",
            ranks_text(&missing),
            time_text(self.guest.limit),
            ranks_text(&joined),
            self.guest.shared
        );
        self.decide(round, &Verdict::Failed(why))
    }

    fn are_here(&self, round: &Round, ranks: &[usize]) -> Result<bool> {
        let keys: Vec<String> = ranks.iter().map(|rank| round.rank(*rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        self.store.check(&keys)
    }

    /// Keeps the store up until the others have read the verdict, also those who are on their way.
    fn linger(&self, round: &Round) {
        let limit = Deadline::after(LINGER);
        let everyone = i64::try_from(self.guest.world_size).unwrap_or(i64::MAX);
        while !limit.passed() {
            match self.store.add(&round.key("heard"), 0) {
                Ok(heard) if heard < everyone => std::thread::sleep(Duration::from_millis(10)),
                _ => return,
            }
        }
    }
}

/// `0,1,2`, and `0-63` for long runs.
fn ranks_text(ranks: &[usize]) -> String {
    const SHOWN: usize = 32;
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let mut parts = Vec::new();
    for &(first, last) in runs.iter().take(SHOWN) {
        match last - first {
            0..=3 => parts.extend((first..=last).map(|rank| rank.to_string())),
            _ => parts.push(format!("{first}-{last}")),
        }
    }
    if runs.len() > SHOWN {
        parts.push("...".to_owned());
    }
    match parts.is_empty() {
        true => "none".to_owned(),
        false => parts.join(","),
    }
}

pub(super) fn time_text(time: Duration) -> String {
    match time.subsec_millis() {
        0 => format!("{} s", time.as_secs()),
        _ => format!("{} ms", time.as_millis()),
    }
}

#[cfg(test)]
#[path = "meet_tests.rs"]
mod tests;
