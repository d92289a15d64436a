//! The job token: a secret that the processes of one job share, and the proof of knowing it.
//!
//! The proof is mutual and replays are useless: the client sends a random nonce, the server
//! answers with its own, the client proves the token over both, then the server does. Each proof
//! is an HMAC-SHA256 that also covers who proves and what the connection is for, so that a proof
//! for one purpose is none for another. No sockets here: the same code guards the store and the
//! connections of backends.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;

use crate::error::{Result, StoreError};

/// The environment variable that carries the token.
pub const TOKEN_VAR: &str = "PHALANX_TOKEN";

/// Bytes in a nonce and in a proof.
pub const LEN: usize = 32;

/// Random bytes that make a proof fresh.
pub type Nonce = [u8; LEN];

/// A secret shared by the processes of one job. Its `Debug` form does not show it.
#[derive(Clone)]
pub struct JobToken(Vec<u8>);

impl fmt::Debug for JobToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobToken(..)")
    }
}

impl JobToken {
    /// A token from its text; empty is refused.
    pub fn new(text: impl Into<String>) -> Result<Self> {
        let text = text.into();
        match text.is_empty() {
            true => Err(StoreError::Invalid("a job token must not be empty".into())),
            false => Ok(Self(text.into_bytes())),
        }
    }

    /// The token in [`TOKEN_VAR`]; `None` if the variable is unset or empty.
    pub fn from_env() -> Result<Option<Self>> {
        match std::env::var(TOKEN_VAR) {
            Ok(text) if text.is_empty() => Ok(None),
            Ok(text) => Self::new(text).map(Some),
            Err(std::env::VarError::NotPresent) => Ok(None),
            Err(std::env::VarError::NotUnicode(_)) => Err(StoreError::Invalid(format!(
                "{TOKEN_VAR} is not valid UTF-8"
            ))),
        }
    }

    /// A fresh random token as text, for a launcher to hand to its workers.
    pub fn generate() -> Result<String> {
        Ok(random_nonce()?
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect())
    }

    fn mac(&self, prover: Prover, purpose: &str, client: &Nonce, server: &Nonce) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes any key length");
        mac.update(&[prover as u8]);
        mac.update(&(purpose.len() as u64).to_le_bytes());
        mac.update(purpose.as_bytes());
        mac.update(client);
        mac.update(server);
        mac
    }
}

#[derive(Clone, Copy)]
enum Prover {
    Client = 1,
    Server = 2,
}

/// Random bytes from the operating system.
pub fn random_nonce() -> Result<Nonce> {
    let mut nonce = [0; LEN];
    getrandom::fill(&mut nonce)
        .map_err(|err| StoreError::io("reading random bytes", std::io::Error::other(err)))?;
    Ok(nonce)
}

/// Both sides of one handshake once both nonces are known.
#[derive(Debug)]
pub struct Handshake<'a> {
    token: &'a JobToken,
    purpose: &'a str,
    client: Nonce,
    server: Nonce,
}

impl<'a> Handshake<'a> {
    /// The handshake of the connection described by `purpose` and the two nonces.
    pub fn new(token: &'a JobToken, purpose: &'a str, client: Nonce, server: Nonce) -> Self {
        Self {
            token,
            purpose,
            client,
            server,
        }
    }

    /// What the client sends to prove that it knows the token.
    pub fn client_proof(&self) -> [u8; LEN] {
        self.proof(Prover::Client)
    }

    /// What the server sends back once it accepts.
    pub fn server_proof(&self) -> [u8; LEN] {
        self.proof(Prover::Server)
    }

    /// Whether a client's proof is right, in constant time.
    pub fn accepts_client(&self, proof: &[u8; LEN]) -> bool {
        self.client_proof().ct_eq(proof).into()
    }

    /// Whether a server's proof is right, in constant time.
    pub fn accepts_server(&self, proof: &[u8; LEN]) -> bool {
        self.server_proof().ct_eq(proof).into()
    }

    fn proof(&self, prover: Prover) -> [u8; LEN] {
        let mac = self
            .token
            .mac(prover, self.purpose, &self.client, &self.server);
        mac.finalize().into_bytes().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_token_role_purpose_and_nonces_only() {
        let token = JobToken::new("secret").unwrap();
        let proof = Handshake::new(&token, "store", [1; LEN], [2; LEN]).client_proof();
        let other = JobToken::new("secreT").unwrap();
        let accepts = |token, purpose, client, server| {
            Handshake::new(token, purpose, [client; LEN], [server; LEN]).accepts_client(&proof)
        };
        assert!(accepts(&token, "store", 1, 2));
        assert!(!accepts(&other, "store", 1, 2));
        assert!(!accepts(&token, "stor", 1, 2));
        assert!(!accepts(&token, "store", 2, 2));
        assert!(!accepts(&token, "store", 1, 1));
        assert!(!Handshake::new(&token, "store", [1; LEN], [2; LEN]).accepts_server(&proof));
    }

    #[test]
    fn a_token_is_not_shown_and_not_empty() {
        let token = JobToken::new("secret").unwrap();
        assert!(!format!("{token:?}").contains("secret"));
        assert!(JobToken::new("").is_err());
        assert_ne!(JobToken::generate().unwrap(), JobToken::generate().unwrap());
    }
}
