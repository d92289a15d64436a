//! Ranks meet through a store and connect to each other: each calls those of lower rank.

use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_pg::{Error, ErrorKind, Result};
use phalanx_store::token::{Handshake, LEN as PROOF_LEN, Nonce, random_nonce};
use phalanx_store::{JobToken, Store, StoreError};

use crate::connect::{Meeting, Patience, Seat};
use crate::hello::{self, Caller, Hello, Host, Next, WELCOME};
use crate::member::Member;
use crate::tcp::{Mesh, os_error};

/// How long a caller may take for its part of the handshake once it is looked after.
const CALLER_LIMIT: Duration = Duration::from_secs(10);

/// Most callers that are listened to at a time; when there are as many, the oldest goes.
const MAX_CALLERS: usize = 128;

/// How often the door is looked at while somebody is missing.
const DOOR_PERIOD: Duration = Duration::from_millis(1);

/// Meets through a store.
#[derive(Debug)]
pub(crate) struct Sockets {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) bind: Option<IpAddr>,
    pub(crate) token: Option<JobToken>,
    pub(crate) connect_timeout: Duration,
}

impl Meeting for Sockets {
    fn meet(&self, seat: &Seat<'_>) -> Result<Arc<Member>> {
        let visit = Visit {
            sockets: self,
            // Its own handle, since waiting on it holds up nobody else then.
            store: self.store.second_handle()?,
            prefix: format!("phalanx/reference{}", seat.identity),
            seat,
            patience: Patience::new(self.connect_timeout, seat.parent),
        };
        let streams = visit.connect()?;
        let member = Member::new(seat, seat.rank);
        Mesh::start(&member, streams)?;
        Ok(member)
    }
}

/// One rank's attempt to join one group.
struct Visit<'a> {
    sockets: &'a Sockets,
    store: Arc<dyn Store>,
    prefix: String,
    seat: &'a Seat<'a>,
    patience: Patience<'a>,
}

impl Visit<'_> {
    /// The connections to all others, by rank.
    fn connect(&self) -> Result<Vec<Option<TcpStream>>> {
        let (rank, size) = (self.seat.rank, self.seat.size());
        let bind = self.sockets.bind.unwrap_or(Ipv4Addr::LOCALHOST.into());
        if bind.is_unspecified() {
            let what = format!("{bind} is no address that other ranks can reach; name one");
            return Err(Error::invalid(what));
        }
        let listener = TcpListener::bind(SocketAddr::new(bind, 0))
            .map_err(|err| os_error(&format!("listening on {bind}"), &err))?;
        let group = self.agree_on_identity()?;
        self.publish(&listener)?;
        let mut streams: Vec<Option<TcpStream>> = (0..size).map(|_| None).collect();
        // Rank 0 only listens, so it answers all; then rank 1 does, and so on.
        for (peer, slot) in streams.iter_mut().enumerate().take(rank) {
            *slot = Some(self.call(peer, &group)?);
        }
        self.admit_callers(&listener, group, &mut streams)?;
        self.clean_up()?;
        Ok(streams)
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    fn address_key(&self, rank: usize) -> String {
        self.key(&format!("address/{rank}"))
    }

    /// Random bytes that the first rank to come has put into the store.
    fn agree_on_identity(&self) -> Result<Nonce> {
        let own = random_nonce()?;
        let agreed = self.store.compare_set(&self.key("nonce"), b"", &own)?;
        agreed.try_into().map_err(|other: Vec<u8>| {
            let what = format!("the store holds {} bytes for a nonce", other.len());
            Error::new(ErrorKind::Store, what)
        })
    }

    fn publish(&self, listener: &TcpListener) -> Result<()> {
        let address = listener
            .local_addr()
            .map_err(|err| os_error("asking for an address", &err))?
            .to_string();
        let key = self.address_key(self.seat.rank);
        let stored = self.store.compare_set(&key, b"", address.as_bytes())?;
        match stored == address.as_bytes() {
            true => Ok(()),
            false => Err(self.seat.taken()),
        }
    }

    /// Nobody reads this rank's keys any more: all who call it have called.
    fn clean_up(&self) -> Result<()> {
        let mut keys = vec![self.address_key(self.seat.rank)];
        if self.seat.rank == 0 {
            keys.push(self.key("nonce"));
        }
        for key in keys {
            match self.store.delete_key(&key) {
                Ok(_) | Err(StoreError::Unsupported { .. }) => {}
                Err(err) => return Err(err.into()),
            }
        }
        Ok(())
    }

    fn address_of(&self, peer: usize) -> Result<SocketAddr> {
        let key = self.address_key(peer);
        let address = loop {
            let stretch = self.patience.stretch(|waited| {
                let waited = waited.as_secs_f64();
                format!(
                    "rank {peer} did not join within {waited:.1} s; is it started, with the \
                         same store and members?"
                )
            });
            let stretch = stretch.map_err(|err| err.from_peer(peer))?;
            match self.store.get_for(&key, stretch) {
                Ok(address) => break address,
                Err(err) if err.is_timeout() => {}
                Err(err) => return Err(err.into()),
            }
        };
        let text = String::from_utf8_lossy(&address);
        text.parse().map_err(|_| {
            let what = format!("the store holds {text:?} as the address of rank {peer}");
            Error::new(ErrorKind::Store, what)
        })
    }

    /// Connects to a rank that hosts.
    fn call(&self, peer: usize, group: &Nonce) -> Result<TcpStream> {
        let address = self.address_of(peer)?;
        let mut last = "no answer".to_owned();
        let stream = loop {
            let stretch = self.patience.stretch(|waited| {
                let waited = waited.as_secs_f64();
                format!(
                    "rank {peer} could not be reached at {address} within {waited:.1} s: {last}"
                )
            });
            let stretch = stretch.map_err(|err| err.from_peer(peer))?;
            match TcpStream::connect_timeout(&address, stretch.max(Duration::from_secs(1))) {
                Ok(stream) => break stream,
                Err(err) => last = err.to_string(),
            }
            std::thread::sleep(DOOR_PERIOD);
        };
        self.introduce(stream, peer, group)
            .map_err(|err| err.from_peer(peer))
    }

    /// The caller's side of the handshake.
    fn introduce(&self, mut stream: TcpStream, peer: usize, group: &Nonce) -> Result<TcpStream> {
        let from = self.seat.rank;
        let token = self.sockets.token.as_ref();
        let nonce = random_nonce()?;
        let hello = Hello {
            group: *group,
            from,
            to: peer,
            token: token.is_some(),
            nonce,
        };
        prepare(&stream)?;
        self.say(&mut stream, peer, &hello.encode())?;
        if let Some(token) = token {
            let mut host_nonce: Nonce = [0; PROOF_LEN];
            self.hear(&mut stream, peer, &mut host_nonce)?;
            let purpose = hello::purpose(&self.seat.name, from, peer);
            let handshake = Handshake::new(token, &purpose, nonce, host_nonce);
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

    fn say(&self, stream: &mut TcpStream, peer: usize, words: &[u8]) -> Result<()> {
        // A few bytes into an empty buffer: this does not block.
        stream
            .write_all(words)
            .map_err(|err| refused(peer, &err.to_string()))
    }

    /// Waits for the host, who may be waiting for lower ranks itself.
    fn hear(&self, stream: &mut TcpStream, peer: usize, words: &mut [u8]) -> Result<()> {
        let mut heard = 0;
        while heard < words.len() {
            let stretch = self.patience.stretch(|waited| {
                let waited = waited.as_secs_f64();
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
    fn admit_callers(
        &self,
        listener: &TcpListener,
        group: Nonce,
        streams: &mut [Option<TcpStream>],
    ) -> Result<()> {
        let host = Host {
            name: &self.seat.name,
            group,
            rank: self.seat.rank,
            size: self.seat.size(),
            token: self.sockets.token.as_ref(),
        };
        listener
            .set_nonblocking(true)
            .map_err(|err| os_error("setting up a socket", &err))?;
        let mut door = Door {
            listener,
            host,
            callers: Vec::new(),
        };
        loop {
            let missing = |rank: &usize| *rank != self.seat.rank && streams[*rank].is_none();
            let missing: Vec<usize> = (0..streams.len()).filter(missing).collect();
            let Some(&first) = missing.first() else {
                return Ok(());
            };
            let wait = self.patience.stretch(|waited| {
                let (waited, limit) = (waited.as_secs_f64(), self.seat.size());
                format!(
                    "ranks {missing:?} of {limit} did not join within {waited:.1} s; are they \
                         started, with the same store, members and job token?"
                )
            });
            wait.map_err(|err| err.from_peer(first))?;
            if !door.look(streams)? {
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

fn is_pause(err: &std::io::Error) -> bool {
    use IoErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(err.kind(), WouldBlock | TimedOut | Interrupted)
}

fn prepare(stream: &TcpStream) -> Result<()> {
    stream
        .set_nodelay(true)
        .map_err(|err| os_error("setting up a socket", &err))
}

/// A listener with those who have called and are not in yet.
struct Door<'a> {
    listener: &'a TcpListener,
    host: Host<'a>,
    /// The oldest first.
    callers: Vec<Visitor>,
}

struct Visitor {
    stream: TcpStream,
    from: SocketAddr,
    since: Instant,
    caller: Caller,
}

impl Door<'_> {
    /// Listens to everybody once, without waiting; whether anything happened.
    fn look(&mut self, streams: &mut [Option<TcpStream>]) -> Result<bool> {
        let mut busy = false;
        // What accept reports is about one caller that went away, or passes.
        while self.callers.len() < MAX_CALLERS
            && let Ok((stream, from)) = self.listener.accept()
        {
            busy = true;
            if stream.set_nonblocking(true).is_ok() && stream.set_nodelay(true).is_ok() {
                self.callers.push(Visitor {
                    stream,
                    from,
                    since: Instant::now(),
                    caller: Caller::new(),
                });
            }
        }
        let mut at = 0;
        while at < self.callers.len() {
            let visitor = &mut self.callers[at];
            let joined = |rank: usize| streams[rank].is_some();
            match visitor.listen(&self.host, &joined)? {
                Next::Listen => at += 1,
                Next::Say(_) => busy = true,
                Next::Refuse(reason) => {
                    let from = visitor.from;
                    tracing::debug!(target: "phalanx::reference", "refused {from}: {reason}");
                    self.callers.remove(at);
                    busy = true;
                }
                Next::Admit(rank, _) => {
                    let stream = self.callers.remove(at).stream;
                    stream
                        .set_nonblocking(false)
                        .map_err(|err| os_error("setting up a socket", &err))?;
                    streams[rank] = Some(stream);
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
    fn listen(&mut self, host: &Host<'_>, joined: &dyn Fn(usize) -> bool) -> Result<Next> {
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
        if let Next::Say(words) | Next::Admit(_, words) = &next
            && let Err(err) = self.stream.write_all(words)
        {
            return Ok(Next::Refuse(err.to_string()));
        }
        Ok(next)
    }
}
