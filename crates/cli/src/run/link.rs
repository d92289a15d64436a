//! How the agents of several nodes reach each other: through keys of the job's store.
//!
//! | key below `phalanx-run/` | value |
//! |---|---|
//! | `id` | the job's id, so that an agent of another job is told |
//! | `inbox` | a queue of messages for the coordinator |
//! | `command_{k}` | the k-th command for all agents |

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use phalanx_store::{PrefixStore, Store, StoreError, TcpStore, TcpStoreOptions};
use serde::de::DeserializeOwned;

use super::message::{AgentId, Command, Message, News};
use super::supervise::Event;
use crate::Failure;

/// How often an agent says that it is there.
const BEAT: Duration = Duration::from_secs(1);
/// How long one look at the store waits. A server that hangs is noticed at the end of it.
const LOOK: Duration = Duration::from_secs(2);

fn connect(options: &TcpStoreOptions) -> Result<Arc<dyn Store>, StoreError> {
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect(options)?);
    Ok(Arc::new(PrefixStore::new("phalanx-run", store)))
}

fn command_key(number: usize) -> String {
    format!("command_{number}")
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    serde_json::from_slice(bytes)
        .map_err(|err| format!("node 0 and this node run different versions of phalanx: {err}"))
}

/// The coordinator's end: reads messages, writes commands.
#[derive(Debug)]
pub(super) struct Hub {
    store: Arc<dyn Store>,
    commands: usize,
}

impl Hub {
    /// Messages of other agents become events from now on.
    pub(super) fn open(
        options: &TcpStoreOptions,
        run_id: &str,
        events: Sender<Event>,
    ) -> Result<Self, Failure> {
        let store = connect(options)?;
        store.set("id", run_id.as_bytes())?;
        let inbox = store.second_handle()?;
        std::thread::Builder::new()
            .name("inbox".into())
            .spawn(move || read_inbox(inbox.as_ref(), &events))?;
        Ok(Self { store, commands: 0 })
    }

    pub(super) fn publish(&mut self, command: &Command) -> Result<(), Failure> {
        let key = command_key(self.commands);
        self.commands += 1;
        Ok(self.store.set(&key, &serde_json::to_vec(command)?)?)
    }
}

fn read_inbox(store: &dyn Store, events: &Sender<Event>) {
    loop {
        let event = match store.queue_pop_for("inbox", LOOK) {
            Ok(bytes) => match parse(&bytes) {
                Ok(message) => Event::Message(message),
                Err(why) => {
                    tracing::warn!("a message from another node is left out: {why}");
                    continue;
                }
            },
            Err(err) if err.is_timeout() => continue,
            Err(err) => Event::LinkLost(format!("this node's own store is lost: {err}")),
        };
        let lost = matches!(event, Event::LinkLost(_));
        if events.send(event).is_err() || lost {
            return;
        }
    }
}

/// Another agent's end: writes messages, reads commands.
#[derive(Debug)]
pub(super) struct Spoke {
    node: usize,
    agent: AgentId,
    store: Arc<dyn Store>,
}

impl Spoke {
    /// Meets node 0; its commands become events from now on.
    pub(super) fn open(
        options: &TcpStoreOptions,
        run_id: &str,
        node: usize,
        agent: AgentId,
        events: Sender<Event>,
    ) -> Result<Self, Failure> {
        let store = connect(options).map_err(|err| format!("cannot reach node 0: {err}"))?;
        let found = store.get_for("id", options.timeout).map_err(|err| {
            let TcpStoreOptions { host, port, .. } = options;
            format!("the store at {host}:{port} is not that of a phalanx run: {err}")
        })?;
        if found != run_id.as_bytes() {
            return Err(format!(
                "node 0 runs a job with --rdzv-id {}, this node was started with {run_id}",
                String::from_utf8_lossy(&found)
            )
            .into());
        }
        let (commands, beats) = (store.second_handle()?, store.second_handle()?);
        let heart = Self {
            node,
            agent,
            store: beats,
        };
        std::thread::Builder::new()
            .name("commands".into())
            .spawn(move || read_commands(commands.as_ref(), &events))?;
        std::thread::Builder::new()
            .name("heartbeat".into())
            .spawn(move || {
                // Whoever reads commands notices the loss of the connection.
                while heart.tell(News::Beat).is_ok() {
                    std::thread::sleep(BEAT);
                }
            })?;
        Ok(Self { node, agent, store })
    }

    pub(super) fn tell(&self, what: News) -> Result<(), Failure> {
        let Self { node, agent, .. } = *self;
        let message = Message { node, agent, what };
        Ok(self
            .store
            .queue_push("inbox", &serde_json::to_vec(&message)?)?)
    }
}

fn read_commands(store: &dyn Store, events: &Sender<Event>) {
    let mut number = 0;
    loop {
        let event = match store.get_for(&command_key(number), LOOK) {
            Ok(bytes) => match parse(&bytes) {
                Ok(command) => Event::Command(command),
                Err(why) => Event::LinkLost(why),
            },
            Err(err) if err.is_timeout() => continue,
            Err(err) => Event::LinkLost(format!("node 0 is lost: {err}")),
        };
        number += 1;
        let lost = matches!(event, Event::LinkLost(_));
        if events.send(event).is_err() || lost {
            return;
        }
    }
}
