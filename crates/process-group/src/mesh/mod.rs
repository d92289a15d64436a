//! Connections between all ranks of a group, made through a store; for backends.
//!
//! Each rank listens, says where in the store, and calls those of lower rank. Every connection
//! proves that it belongs to the group and, if there is a job token, that it knows it; who does
//! not is turned away without harm. All waits end at a limit, and errors name who is missing.

mod hello;
mod stream;

use std::io::{self, ErrorKind as IoErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_store::token::{Handshake, LEN as PROOF_LEN, Nonce, random_nonce};
use phalanx_store::{Deadline, JobToken, Store, StoreError};
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use hello::{Caller, Hello, Host, Next, WELCOME};
use stream::Listeners;
pub use stream::Stream;

/// How long a caller may take for its part of the handshake once it is looked after.
const CALLER_LIMIT: Duration = Duration::from_secs(10);

/// Most callers that are listened to at a time; when there are as many, the oldest goes.
const MAX_CALLERS: usize = 128;

/// How often the door is looked at while somebody is missing.
const DOOR_PERIOD: Duration = Duration::from_millis(1);

/// How long a rank sits still before it asks whether to give up.
const GLANCE: Duration = Duration::from_millis(100);

/// The ranks of a group that want to be connected. Every rank makes one.
pub struct Meeting<'a> {
    /// Where they meet; a handle of its own, for waiting on it holds up nobody else then.
    pub store: Arc<dyn Store>,
    /// Below which keys. Serves one meeting.
    pub prefix: String,
    /// Name of the group, for proofs and errors.
    pub name: &'a str,
    /// Own rank in the group.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// The address to listen on, which other hosts must be able to reach; loopback if `None`.
    pub bind: Option<IpAddr>,
    /// The job's secret.
    pub token: Option<&'a JobToken>,
    /// How long it may take.
    pub limit: Duration,
    /// Asked while waiting; what it answers ends the attempt.
    pub give_up: &'a dyn Fn() -> Option<Error>,
}

/// On which way to call a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// No connection is needed. Both ranks must see it so.
    None,
    /// Over the network.
    Tcp,
    /// Inside the host, which must be the same.
    Unix,
}

/// What a rank says about itself in the store.
#[derive(Debug, Serialize, Deserialize)]
struct Card {
    tcp: SocketAddr,
    unix: [u8; 16],
    notes: Vec<u8>,
}

impl Meeting<'_> {
    /// The connections to all others, by rank; none to itself and where no way leads.
    ///
    /// `notes` is told to all ranks, and `route` makes of everybody's notes, by rank, the ways to
    /// take from this rank: it must come to the same for both ends.
    pub fn connect(
        &self,
        notes: &[u8],
        route: impl FnOnce(&[Vec<u8>]) -> Result<Vec<Way>>,
    ) -> Result<Vec<Option<Stream>>> {
        let streams = self.connect_streams(1, notes, route)?;
        Ok(streams.into_iter().map(|mut one| one.pop()).collect())
    }

    /// The same with `streams` connections to each rank, in the same order at both ends. All ranks
    /// must ask for as many.
    pub fn connect_streams(
        &self,
        streams: usize,
        notes: &[u8],
        route: impl FnOnce(&[Vec<u8>]) -> Result<Vec<Way>>,
    ) -> Result<Vec<Vec<Stream>>> {
        let visit = Visit {
            meeting: self,
            streams,
            deadline: Deadline::after(self.limit),
        };
        visit.connect(notes, route)
    }
}

/// By rank and number: the connections that have been made.
type Made = Vec<Vec<Option<Stream>>>;

/// One rank's attempt to join.
struct Visit<'a> {
    meeting: &'a Meeting<'a>,
    streams: usize,
    deadline: Deadline,
}

impl Visit<'_> {
    fn connect(
        &self,
        notes: &[u8],
        route: impl FnOnce(&[Vec<u8>]) -> Result<Vec<Way>>,
    ) -> Result<Vec<Vec<Stream>>> {
        let (rank, size) = (self.meeting.rank, self.meeting.size);
        let bind = self.meeting.bind.unwrap_or(Ipv4Addr::LOCALHOST.into());
        if bind.is_unspecified() {
            let what = format!("{bind} is no address that other ranks can reach; name one");
            return Err(Error::invalid(what));
        }
        let secret = random_nonce()?;
        let unix: [u8; 16] = secret[..16].try_into().expect("a nonce is longer");
        let listeners = Listeners::open(bind, &unix)
            .map_err(|err| os_error(&format!("listening on {bind}"), &err))?;
        let group = self.agree_on_identity()?;
        self.publish(&Card {
            tcp: listeners
                .tcp_address()
                .map_err(|err| os_error("asking for an address", &err))?,
            unix,
            notes: notes.to_vec(),
        })?;
        let cards = (0..size).map(|peer| self.card_of(peer));
        let mut cards = cards.collect::<Result<Vec<Card>>>()?;
        let notes: Vec<Vec<u8>> = cards
            .iter_mut()
            .map(|card| std::mem::take(&mut card.notes))
            .collect();
        let ways = route(&notes)?;
        let none = |way: &Way| match way {
            Way::None => Vec::new(),
            _ => (0..self.streams).map(|_| None).collect(),
        };
        let mut made: Made = ways.iter().map(none).collect();
        made[rank].clear();
        // Rank 0 only listens, so it answers all; then rank 1 does, and so on.
        for peer in 0..rank {
            for (stream, place) in made[peer].iter_mut().enumerate() {
                let called = self.call(peer, stream, &cards[peer], ways[peer], &group);
                *place = Some(called?);
            }
        }
        self.admit_callers(&listeners, group, &mut made)?;
        self.clean_up()?;
        let all = made.into_iter().map(|one| one.into_iter().flatten());
        Ok(all.map(Iterator::collect).collect())
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.meeting.prefix)
    }

    fn card_key(&self, rank: usize) -> String {
        self.key(&format!("card/{rank}"))
    }

    /// Random bytes that the first rank to come has put into the store.
    fn agree_on_identity(&self) -> Result<Nonce> {
        let own = random_nonce()?;
        let agreed = self
            .meeting
            .store
            .compare_set(&self.key("nonce"), b"", &own)?;
        agreed.try_into().map_err(|other: Vec<u8>| {
            let what = format!("the store holds {} bytes for a nonce", other.len());
            Error::new(ErrorKind::Store, what)
        })
    }

    fn publish(&self, card: &Card) -> Result<()> {
        let bytes = postcard::to_stdvec(card)
            .map_err(|err| Error::new(ErrorKind::Backend, format!("encoding a card: {err}")))?;
        let key = self.card_key(self.meeting.rank);
        let stored = self.meeting.store.compare_set(&key, b"", &bytes)?;
        match stored == bytes {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "rank {} has joined group {:?} before; each rank joins once, and a store serves a \
                 group name once",
                self.meeting.rank, self.meeting.name
            ))),
        }
    }

    /// The last to have read everybody's card takes them away.
    fn clean_up(&self) -> Result<()> {
        let (store, size) = (&self.meeting.store, self.meeting.size);
        if store.add(&self.key("read"), 1)? < size as i64 {
            return Ok(());
        }
        let cards = (0..size).map(|rank| self.card_key(rank));
        for key in cards.chain([self.key("nonce"), self.key("read")]) {
            match store.delete_key(&key) {
                Ok(_) | Err(StoreError::Unsupported { .. }) => {}
                Err(err) => return Err(err.into()),
            }
        }
        Ok(())
    }

    /// The next stretch of waiting, or what ends it; `late` makes the error of the limit.
    fn stretch(&self, late: impl FnOnce(f64) -> String) -> Result<Duration> {
        if let Some(err) = (self.meeting.give_up)() {
            return Err(err);
        }
        match self.deadline.passed() {
            true => {
                let waited = self.deadline.elapsed().as_secs_f64();
                Err(Error::new(ErrorKind::Timeout, late(waited)))
            }
            false => Ok(self.deadline.left().min(GLANCE)),
        }
    }

    fn card_of(&self, peer: usize) -> Result<Card> {
        let key = self.card_key(peer);
        let bytes = loop {
            let stretch = self.stretch(|waited| {
                format!(
                    "rank {peer} did not join within {waited:.1} s; is it started, with the same \
                     store, members and job token?"
                )
            });
            match self
                .meeting
                .store
                .get_for(&key, stretch.map_err(|err| err.from_peer(peer))?)
            {
                Ok(bytes) => break bytes,
                Err(err) if err.is_timeout() => {}
                Err(err) => return Err(err.into()),
            }
        };
        postcard::from_bytes(&bytes).map_err(|_| {
            let what = format!("the store holds something else than the card of rank {peer}");
            Error::new(ErrorKind::Store, what)
        })
    }

    /// Makes one connection to a rank that hosts.
    fn call(
        &self,
        peer: usize,
        number: usize,
        card: &Card,
        way: Way,
        group: &Nonce,
    ) -> Result<Stream> {
        let mut last = "no answer".to_owned();
        let stream = loop {
            let stretch = self.stretch(|waited| {
                let address = card.tcp;
                format!(
                    "rank {peer} could not be reached at {address} within {waited:.1} s: {last}"
                )
            });
            let stretch = stretch.map_err(|err| err.from_peer(peer))?;
            let called = match way {
                Way::Unix => stream::call_unix(&card.unix),
                _ => stream::call_tcp(card.tcp, stretch.max(Duration::from_secs(1))),
            };
            match called {
                Ok(stream) => break stream,
                Err(err) => last = err.to_string(),
            }
            std::thread::sleep(DOOR_PERIOD);
        };
        let hello = Hello {
            group: *group,
            from: self.meeting.rank,
            to: peer,
            stream: number,
            token: self.meeting.token.is_some(),
            nonce: random_nonce()?,
        };
        self.introduce(stream, &hello)
            .map_err(|err| err.from_peer(peer))
    }

    /// The caller's side of the handshake.
    fn introduce(&self, mut stream: Stream, hello: &Hello) -> Result<Stream> {
        let peer = hello.to;
        stream
            .prepare()
            .map_err(|err| refused(peer, &err.to_string()))?;
        self.say(&mut stream, peer, &hello.encode())?;
        if let Some(token) = self.meeting.token {
            let mut host_nonce: Nonce = [0; PROOF_LEN];
            self.hear(&mut stream, peer, &mut host_nonce)?;
            let purpose = hello::purpose(self.meeting.name, hello);
            let handshake = Handshake::new(token, &purpose, hello.nonce, host_nonce);
            self.say(&mut stream, peer, &handshake.client_proof())?;
            let mut proof = [0; PROOF_LEN];
            self.hear(&mut stream, peer, &mut proof)?;
            if !handshake.accepts_server(&proof) {
                let what = format!("what answers for rank {peer} does not know the job token");
                return Err(Error::new(ErrorKind::Backend, what));
            }
        }
        let mut welcome = [0; WELCOME.len()];
        self.hear(&mut stream, peer, &mut welcome)?;
        match welcome == WELCOME {
            true => {
                stream
                    .set_read_timeout(None)
                    .map_err(|err| os_error("setting up a socket", &err))?;
                Ok(stream)
            }
            false => Err(refused(peer, "it answered something else")),
        }
    }

    fn say(&self, stream: &mut Stream, peer: usize, words: &[u8]) -> Result<()> {
        // A few bytes into an empty buffer: this does not block.
        stream
            .write_all(words)
            .map_err(|err| refused(peer, &err.to_string()))
    }

    /// Waits for the host, who may be waiting for lower ranks itself.
    fn hear(&self, stream: &mut Stream, peer: usize, words: &mut [u8]) -> Result<()> {
        let mut heard = 0;
        while heard < words.len() {
            let stretch = self.stretch(|waited| {
                format!("rank {peer} did not answer within {waited:.1} s; it may wait for others")
            })?;
            stream
                .set_read_timeout(Some(stretch.max(DOOR_PERIOD)))
                .map_err(|err| os_error("setting up a socket", &err))?;
            match stream.read(&mut words[heard..]) {
                Ok(0) => return Err(refused(peer, "it closed the connection")),
                Ok(count) => heard += count,
                Err(err) if is_pause(&err) => {}
                Err(err) => return Err(refused(peer, &err.to_string())),
            }
        }
        Ok(())
    }

    /// Lets all higher ranks in, and nobody else.
    fn admit_callers(&self, listeners: &Listeners, group: Nonce, made: &mut Made) -> Result<()> {
        let (rank, size) = (self.meeting.rank, self.meeting.size);
        let host = Host {
            name: self.meeting.name,
            group,
            rank,
            size,
            streams: self.streams,
            token: self.meeting.token,
        };
        let mut door = Door {
            listeners,
            host,
            callers: Vec::new(),
        };
        loop {
            let missing = (0..size).filter(|&peer| made[peer].iter().any(Option::is_none));
            let missing: Vec<usize> = missing.collect();
            let Some(&first) = missing.first() else {
                return Ok(());
            };
            let wait = self.stretch(|waited| {
                format!(
                    "ranks {missing:?} of {size} did not join within {waited:.1} s; are they \
                     started, with the same store, members and job token?"
                )
            });
            wait.map_err(|err| err.from_peer(first))?;
            if !door.look(made)? {
                std::thread::sleep(DOOR_PERIOD);
            }
        }
    }
}

fn refused(peer: usize, reason: &str) -> Error {
    let what = format!(
        "rank {peer} refused the connection: {reason}; do all ranks have the same job token, and \
         each rank a process of its own?"
    );
    Error::new(ErrorKind::Backend, what)
}

fn is_pause(err: &io::Error) -> bool {
    use IoErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(err.kind(), WouldBlock | TimedOut | Interrupted)
}

fn os_error(what: &str, err: &io::Error) -> Error {
    Error::new(ErrorKind::Backend, format!("{what}: {err}"))
}

/// Listeners with those who have called and are not in yet.
struct Door<'a> {
    listeners: &'a Listeners,
    host: Host<'a>,
    /// The oldest first.
    callers: Vec<Visitor>,
}

struct Visitor {
    stream: Stream,
    since: Instant,
    caller: Caller,
}

impl Door<'_> {
    /// Listens to everybody once, without waiting; whether anything happened.
    fn look(&mut self, made: &mut Made) -> Result<bool> {
        let mut busy = false;
        while self.callers.len() < MAX_CALLERS
            && let Some(stream) = self.listeners.accept()
        {
            busy = true;
            if stream.set_nonblocking(true).is_ok() && stream.prepare().is_ok() {
                self.callers.push(Visitor {
                    stream,
                    since: Instant::now(),
                    caller: Caller::new(),
                });
            }
        }
        let mut at = 0;
        while at < self.callers.len() {
            let visitor = &mut self.callers[at];
            let joined = |rank: usize, stream: usize| {
                let place = made[rank].get(stream);
                // Nobody waits for a connection that has no place.
                place.is_none_or(Option::is_some)
            };
            match visitor.listen(&self.host, &joined)? {
                Next::Listen => at += 1,
                Next::Say(_) => busy = true,
                Next::Refuse(reason) => {
                    let name = self.host.name;
                    tracing::debug!(target: "phalanx::mesh", "{name:?} refused a caller: {reason}");
                    self.callers.remove(at);
                    busy = true;
                }
                Next::Admit(rank, number, _) => {
                    let stream = self.callers.remove(at).stream;
                    stream
                        .set_nonblocking(false)
                        .map_err(|err| os_error("setting up a socket", &err))?;
                    made[rank][number] = Some(stream);
                    busy = true;
                }
            }
        }
        if self.callers.len() == MAX_CALLERS {
            // Has been listened to many times by now; a rank speaks at once.
            self.callers.remove(0);
        }
        Ok(busy)
    }
}

impl Visitor {
    /// Reads what is there and answers it. `Say` and `Admit` have been said when they come back.
    fn listen(&mut self, host: &Host<'_>, joined: &dyn Fn(usize, usize) -> bool) -> Result<Next> {
        let mut words = [0; hello::HELLO_LEN];
        let next = match self.stream.read(&mut words[..self.caller.wanted()]) {
            Ok(0) => Next::Refuse("it went away".into()),
            Ok(count) => self
                .caller
                .hear(&words[..count], host, &random_nonce()?, joined),
            Err(err) if is_pause(&err) && self.since.elapsed() < CALLER_LIMIT => Next::Listen,
            Err(err) if is_pause(&err) => Next::Refuse("it says nothing".into()),
            Err(err) => Next::Refuse(err.to_string()),
        };
        if let Next::Say(words) | Next::Admit(_, _, words) = &next
            && let Err(err) = self.stream.write_all(words)
        {
            return Ok(Next::Refuse(err.to_string()));
        }
        Ok(next)
    }
}

impl std::fmt::Debug for Meeting<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rank, size, name) = (self.rank, self.size, self.name);
        write!(f, "Meeting(rank {rank} of {size}, {name:?})")
    }
}
