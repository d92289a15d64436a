//! How two ranks that have just been connected make sure of each other.
//!
//! ```text
//! caller                                   host
//!   hello: magic, group, from, to,
//!          which stream, nonce           -->
//!                                        <-- nonce            (with a job token)
//!   proof of the token                   -->                  (with a job token)
//!                                        <-- proof            (with a job token)
//!                                        <-- welcome
//! ```
//!
//! Everything has a fixed size. The group is known by random bytes that its ranks agreed on in
//! the store, under its name: who does not share the store does not know them. The host's side is
//! a state machine without a socket, for it has to cope with strangers.

use phalanx_store::JobToken;
use phalanx_store::token::{Handshake, LEN as PROOF_LEN, Nonce};

/// First bytes of a connection; the last one is the version.
const MAGIC: [u8; 8] = *b"PHLXPGR\x02";

/// Last bytes of a handshake that went well.
pub(super) const WELCOME: [u8; 8] = *b"welcome\n";

/// Magic, group, from, to, stream, whether there is a token, nonce.
pub(super) const HELLO_LEN: usize = 8 + 32 + 4 + 4 + 4 + 1 + 32;

/// The first thing a caller says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) group: Nonce,
    pub(super) from: usize,
    pub(super) to: usize,
    /// Which of the connections between the two.
    pub(super) stream: usize,
    pub(super) token: bool,
    pub(super) nonce: Nonce,
}

impl Hello {
    pub(super) fn encode(&self) -> Vec<u8> {
        let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
        let mut bytes = Vec::with_capacity(HELLO_LEN);
        bytes.extend(MAGIC);
        bytes.extend(self.group);
        bytes.extend(number(self.from));
        bytes.extend(number(self.to));
        bytes.extend(number(self.stream));
        bytes.push(self.token.into());
        bytes.extend(self.nonce);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (magic, bytes) = bytes.split_first_chunk::<8>()?;
        let (group, bytes) = bytes.split_first_chunk()?;
        let (from, bytes) = bytes.split_first_chunk()?;
        let (to, bytes) = bytes.split_first_chunk()?;
        let (stream, bytes) = bytes.split_first_chunk()?;
        let ([token], bytes) = bytes.split_first_chunk()?;
        let (nonce, []) = bytes.split_first_chunk()? else {
            return None;
        };
        (*magic == MAGIC && *token <= 1).then_some(Self {
            group: *group,
            from: u32::from_le_bytes(*from) as usize,
            to: u32::from_le_bytes(*to) as usize,
            stream: u32::from_le_bytes(*stream) as usize,
            token: *token == 1,
            nonce: *nonce,
        })
    }
}

/// What a proof between two ranks of a group is for.
pub(super) fn purpose(group: &str, hello: &Hello) -> String {
    let (from, to, stream) = (hello.from, hello.to, hello.stream);
    format!("phalanx group {group:?}, rank {from} to rank {to}, stream {stream}")
}

/// What a host knows before anybody calls.
#[derive(Debug)]
pub(super) struct Host<'a> {
    pub(super) name: &'a str,
    pub(super) group: Nonce,
    pub(super) rank: usize,
    pub(super) size: usize,
    /// Connections that a rank makes.
    pub(super) streams: usize,
    pub(super) token: Option<&'a JobToken>,
}

/// A host's view of one caller.
#[derive(Debug)]
pub(super) struct Caller {
    stage: Stage,
    heard: Vec<u8>,
}

#[derive(Debug)]
enum Stage {
    Hello,
    Proof { hello: Hello, nonce: Nonce },
}

/// What a host does next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Listens for more.
    Listen,
    /// Says this and listens.
    Say(Vec<u8>),
    /// Lets this rank's connection of this number in with these words.
    Admit(usize, usize, Vec<u8>),
    /// Closes the connection, for this reason.
    Refuse(String),
}

impl Caller {
    pub(super) fn new() -> Self {
        Self {
            stage: Stage::Hello,
            heard: Vec::new(),
        }
    }

    /// How many bytes to read at most; more would not be the handshake's.
    pub(super) fn wanted(&self) -> usize {
        let whole = match self.stage {
            Stage::Hello => HELLO_LEN,
            Stage::Proof { .. } => PROOF_LEN,
        };
        whole - self.heard.len()
    }

    /// The caller has said this, [`wanted`](Caller::wanted) bytes at most. `nonce` is used once
    /// if at all and must be fresh; `joined` says which connections of whom are in.
    pub(super) fn hear(
        &mut self,
        bytes: &[u8],
        host: &Host<'_>,
        nonce: &Nonce,
        joined: &dyn Fn(usize, usize) -> bool,
    ) -> Next {
        self.heard.extend_from_slice(bytes);
        let start = self.heard.len().min(MAGIC.len());
        if matches!(self.stage, Stage::Hello) && self.heard[..start] != MAGIC[..start] {
            return Next::Refuse("it speaks something else".into());
        }
        if self.wanted() > 0 {
            return Next::Listen;
        }
        let heard = std::mem::take(&mut self.heard);
        let next = match &self.stage {
            Stage::Hello => greet(&heard, host),
            Stage::Proof { hello, nonce } => verify(&heard, hello, nonce, host),
        };
        match next {
            Ok(Step::Challenge(hello)) => {
                self.stage = Stage::Proof {
                    hello,
                    nonce: *nonce,
                };
                Next::Say(nonce.to_vec())
            }
            Ok(Step::Admit(rank, stream, _)) if joined(rank, stream) => {
                Next::Refuse(format!("rank {rank} is already connected"))
            }
            Ok(Step::Admit(rank, stream, mut words)) => {
                words.extend(WELCOME);
                Next::Admit(rank, stream, words)
            }
            Err(reason) => Next::Refuse(reason),
        }
    }
}

enum Step {
    Challenge(Hello),
    Admit(usize, usize, Vec<u8>),
}

fn greet(heard: &[u8], host: &Host<'_>) -> Result<Step, String> {
    let hello = Hello::decode(heard).ok_or("its hello makes no sense")?;
    if hello.group != host.group {
        return Err("it belongs to another group".into());
    }
    if hello.to != host.rank || hello.from <= host.rank || hello.from >= host.size {
        return Err(format!(
            "rank {} has no business with rank {} here",
            hello.from, hello.to
        ));
    }
    if hello.stream >= host.streams {
        let (stream, streams) = (hello.stream, host.streams);
        return Err(format!("it makes connection {stream} of {streams}"));
    }
    match (hello.token, host.token) {
        (true, Some(_)) => Ok(Step::Challenge(hello)),
        (false, None) => Ok(Step::Admit(hello.from, hello.stream, Vec::new())),
        (true, None) => Err("it has a job token, this rank has none".into()),
        (false, Some(_)) => Err("it has no job token".into()),
    }
}

fn verify(heard: &[u8], hello: &Hello, nonce: &Nonce, host: &Host<'_>) -> Result<Step, String> {
    let token = host.token.ok_or("this rank has no job token")?;
    let proof: &[u8; PROOF_LEN] = heard.try_into().map_err(|_| "its proof is cut")?;
    let purpose = purpose(host.name, hello);
    let handshake = Handshake::new(token, &purpose, hello.nonce, *nonce);
    match handshake.accepts_client(proof) {
        true => Ok(Step::Admit(
            hello.from,
            hello.stream,
            handshake.server_proof().to_vec(),
        )),
        false => Err("it does not know the job token".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: Nonce = [7; 32];

    fn host(token: Option<&JobToken>) -> Host<'_> {
        Host {
            name: "g",
            group: GROUP,
            rank: 1,
            size: 4,
            streams: 2,
            token,
        }
    }

    fn hello() -> Hello {
        Hello {
            group: GROUP,
            from: 2,
            to: 1,
            stream: 1,
            token: false,
            nonce: [1; 32],
        }
    }

    fn hear(bytes: &[u8]) -> Next {
        Caller::new().hear(bytes, &host(None), &[2; 32], &|rank, stream| {
            (rank, stream) == (3, 1)
        })
    }

    fn is_refused(next: Next) -> bool {
        matches!(next, Next::Refuse(_))
    }

    #[test]
    fn a_member_is_admitted_byte_by_byte() {
        let mut caller = Caller::new();
        let bytes = hello().encode();
        assert_eq!(bytes.len(), HELLO_LEN);
        for byte in &bytes[..HELLO_LEN - 1] {
            let next = caller.hear(&[*byte], &host(None), &[2; 32], &|_, _| false);
            assert_eq!(next, Next::Listen);
        }
        let next = caller.hear(&bytes[HELLO_LEN - 1..], &host(None), &[2; 32], &|_, _| {
            false
        });
        assert_eq!(next, Next::Admit(2, 1, WELCOME.to_vec()));
    }

    #[test]
    fn strangers_are_refused_at_the_first_wrong_byte() {
        assert!(is_refused(hear(b"GET / HTTP/1.1\r\n")));
        assert!(is_refused(hear(b"PHLXX")));
        assert_eq!(hear(b"PHLX"), Next::Listen);
        assert_eq!(hear(b""), Next::Listen);
    }

    #[test]
    fn members_of_other_groups_and_wrong_ranks_are_refused() {
        let with = |change: fn(&mut Hello)| {
            let mut hello = hello();
            change(&mut hello);
            hear(&hello.encode())
        };
        assert!(is_refused(with(|h| h.group[0] ^= 1)));
        assert!(is_refused(with(|h| h.from = 3))); // has joined
        assert!(!is_refused(with(|h| (h.from, h.stream) = (3, 0)))); // with its other connection
        assert!(is_refused(with(|h| h.stream = 2)));
        assert!(is_refused(with(|h| h.from = 0))); // is called, does not call
        assert!(is_refused(with(|h| h.from = 4)));
        assert!(is_refused(with(|h| h.from = usize::MAX)));
        assert!(is_refused(with(|h| h.to = 2)));
        assert!(is_refused(with(|h| h.token = true)));
    }

    #[test]
    fn a_token_is_proved_by_both_sides() {
        let (right, wrong) = (JobToken::new("a").unwrap(), JobToken::new("b").unwrap());
        let prove = |token: &JobToken| {
            let host_side = host(Some(&right));
            let mut caller = Caller::new();
            let hello = Hello {
                token: true,
                ..hello()
            };
            let next = caller.hear(&hello.encode(), &host_side, &[2; 32], &|_, _| false);
            assert_eq!(next, Next::Say([2; 32].to_vec()));
            let purpose = purpose("g", &hello);
            let handshake = Handshake::new(token, &purpose, hello.nonce, [2; 32]);
            // Another nonce is offered now; the proof is over the first.
            let proof = handshake.client_proof();
            (
                caller.hear(&proof, &host_side, &[3; 32], &|_, _| false),
                handshake.server_proof(),
            )
        };
        let (next, server) = prove(&right);
        assert_eq!(next, Next::Admit(2, 1, [&server[..], &WELCOME].concat()));
        assert!(is_refused(prove(&wrong).0));
        let mut caller = Caller::new();
        let next = caller.hear(&hello().encode(), &host(Some(&right)), &[2; 32], &|_, _| {
            false
        });
        assert!(is_refused(next));
    }
}
