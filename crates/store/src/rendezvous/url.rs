//! Rendezvous URLs: `tcp://host:port`, `file:///path`, `env://`.

use std::path::PathBuf;

use super::env::{Launcher, LauncherEnv, MAX_WORLD_SIZE, MeetingPoint, host_name};
use super::vars::{Lookup, shown};
use crate::error::{Result, StoreError};

/// What a URL and the arguments beside it say, with `env://` read through `lookup`.
pub(super) fn parse(
    url: &str,
    rank: Option<usize>,
    world_size: Option<usize>,
    lookup: Lookup<'_>,
) -> Result<LauncherEnv> {
    let bad = |why: String| StoreError::Invalid(format!("rendezvous URL {}: {why}", shown(url)));
    let known = "known are env://, tcp://HOST:PORT and file:///PATH";
    let Some((scheme, rest)) = url.split_once("://") else {
        return Err(bad(format!("it has no scheme; {known}")));
    };
    let (target, query) = rest.split_once('?').unwrap_or((rest, ""));
    let mut query = Query::parse(query).map_err(bad)?;
    query.merge("rank", rank, |q| &mut q.rank).map_err(bad)?;
    query
        .merge("world_size", world_size, |q| &mut q.world_size)
        .map_err(bad)?;
    match scheme {
        "env" if target.trim_matches('/').is_empty() => from_environment(&query, lookup),
        "env" => Err(bad(format!(
            "env:// takes no host or path, but has {target:?}"
        ))),
        "tcp" => {
            let meeting = tcp(target).map_err(bad)?;
            query.complete(meeting).map_err(bad)
        }
        "file" => {
            let meeting = file(target).map_err(bad)?;
            query.complete(meeting).map_err(bad)
        }
        other => Err(bad(format!("the scheme {other:?} is unknown; {known}"))),
    }
}

/// `RANK` and `WORLD_SIZE` from the URL or arguments, the rest from the environment.
fn from_environment(query: &Query, lookup: Lookup<'_>) -> Result<LauncherEnv> {
    LauncherEnv::from_lookup(&|name| {
        let given = match name {
            "RANK" => query.rank,
            "WORLD_SIZE" => query.world_size,
            _ => None,
        };
        given.map_or_else(|| lookup(name), |number| Some(number.to_string()))
    })
}

fn tcp(target: &str) -> Result<MeetingPoint, String> {
    let target = target.strip_suffix('/').unwrap_or(target);
    let missing = "the port is missing; write tcp://HOST:PORT";
    // Behind the bracket of an IPv6 address, if there is one.
    let (host, port) = match target.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, port),
        _ => return Err(missing.to_owned()),
    };
    if port.is_empty() {
        return Err(missing.to_owned());
    }
    let host = host_name(host).map_err(|why| format!("the host {host:?} {why}"))?;
    let number = port.parse().ok().filter(|&port| port > 0);
    let port =
        number.ok_or_else(|| format!("the port {port:?} is not a number from 1 to 65535"))?;
    Ok(MeetingPoint::Tcp {
        host: host.to_owned(),
        port,
        agent_hosted: false,
    })
}

fn file(target: &str) -> Result<MeetingPoint, String> {
    let path = PathBuf::from(target);
    match (target, path.is_absolute()) {
        ("" | "/", _) => Err("the path is missing; write file:///PATH".to_owned()),
        (_, false) => Err(format!(
            "the path {target:?} is not absolute; write file:///PATH, with three slashes"
        )),
        _ => Ok(MeetingPoint::File { path }),
    }
}

/// The part behind `?`.
#[derive(Debug, Default)]
struct Query {
    rank: Option<usize>,
    world_size: Option<usize>,
}

impl Query {
    fn parse(text: &str) -> Result<Self, String> {
        let mut query = Self::default();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let number = || {
                let number = value.parse().ok().filter(|&n: &usize| n <= MAX_WORLD_SIZE);
                number.ok_or_else(|| {
                    let value = shown(value);
                    format!("{name}={value} is not a number from 0 to {MAX_WORLD_SIZE}")
                })
            };
            let old = match name {
                "rank" => query.rank.replace(number()?),
                "world_size" => query.world_size.replace(number()?),
                // PyTorch's choice of server; ours is always the new one.
                "use_libuv" => None,
                other => {
                    return Err(format!(
                        "the parameter {} is unknown; known are rank and world_size",
                        shown(other)
                    ));
                }
            };
            if old.is_some() {
                return Err(format!("{name} is given twice"));
            }
        }
        Ok(query)
    }

    fn merge(
        &mut self,
        name: &str,
        argument: Option<usize>,
        field: impl Fn(&mut Self) -> &mut Option<usize>,
    ) -> Result<(), String> {
        match (field(self), argument) {
            (Some(_), Some(_)) => Err(format!(
                "{name} is given in the URL and as an argument; give it once"
            )),
            (_, None) => Ok(()),
            (field, argument) => {
                *field = argument;
                Ok(())
            }
        }
    }

    /// The environment of a URL that names its meeting point.
    fn complete(&self, meeting: MeetingPoint) -> Result<LauncherEnv, String> {
        let missing = |name: &str| {
            format!("{name} is missing; add ?{name}=N to the URL or give it as an argument")
        };
        let problems = match (self.rank, self.world_size) {
            (Some(rank), Some(world_size)) if rank < world_size => {
                return Ok(LauncherEnv {
                    rank,
                    world_size,
                    local_rank: None,
                    local_world_size: None,
                    node_rank: None,
                    num_nodes: None,
                    launcher: Launcher::Url,
                    meeting,
                    ..LauncherEnv::alone()
                });
            }
            (Some(rank), Some(world_size)) => {
                vec![format!("rank {rank} is not below world_size {world_size}")]
            }
            (rank, world_size) => {
                let rank = rank.is_none().then(|| missing("rank"));
                let world_size = world_size.is_none().then(|| missing("world_size"));
                rank.into_iter().chain(world_size).collect()
            }
        };
        Err(problems.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(_: &str) -> Option<String> {
        None
    }

    fn error(url: &str, rank: Option<usize>, world_size: Option<usize>) -> String {
        parse(url, rank, world_size, &nothing)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn tcp_urls_name_host_and_port() {
        for (url, host, port) in [
            ("tcp://node1:29500?rank=1&world_size=4", "node1", 29500),
            ("tcp://node1:29500/?rank=1&world_size=4", "node1", 29500),
            (
                "tcp://10.0.0.1:1?world_size=4&rank=1&use_libuv=0",
                "10.0.0.1",
                1,
            ),
            ("tcp://[::1]:65535?rank=1&world_size=4", "::1", 65535),
        ] {
            let env = parse(url, None, None, &nothing).unwrap();
            let host = host.to_owned();
            let point = MeetingPoint::Tcp {
                host,
                port,
                agent_hosted: false,
            };
            assert_eq!((env.rank, env.world_size), (1, 4), "{url}");
            assert_eq!(env.meeting, point, "{url}");
            assert_eq!(env.launcher, Launcher::Url);
            assert_eq!(env.local_rank, None);
        }
    }

    #[test]
    fn file_urls_name_a_path() {
        let env = parse("file:///scratch/job 1?rank=0", None, Some(2), &nothing).unwrap();
        let path = PathBuf::from("/scratch/job 1");
        assert_eq!(env.meeting, MeetingPoint::File { path });
    }

    #[test]
    fn env_urls_take_the_rest_from_the_environment() {
        let lookup = |name: &str| match name {
            "MASTER_ADDR" => Some("node1".to_owned()),
            "MASTER_PORT" => Some("7".to_owned()),
            "WORLD_SIZE" => Some("3".to_owned()),
            _ => None,
        };
        let env = parse("env://", Some(2), None, &lookup).unwrap();
        assert_eq!((env.rank, env.world_size), (2, 3));
        let env = parse("env://?rank=0&world_size=5", None, None, &lookup).unwrap();
        assert_eq!((env.rank, env.world_size), (0, 5));
        let message = parse("env://", None, None, &lookup)
            .unwrap_err()
            .to_string();
        assert!(message.contains("RANK is not set"), "{message}");
        assert_eq!(parse("env://", None, None, &nothing).unwrap().world_size, 1);
    }

    #[test]
    fn what_is_wrong_with_a_url_is_said() {
        let two = "?rank=0&world_size=2";
        for (url, expected) in [
            (
                "localhost:29500".to_owned(),
                "no scheme; known are env://, tcp://",
            ),
            (
                format!("etcd://h:1{two}"),
                "\"etcd\" is unknown; known are env://, tcp://",
            ),
            (format!("tcp://h{two}"), "port is missing"),
            (format!("tcp://h:{two}"), "port is missing"),
            (format!("tcp://[::1]{two}"), "port is missing"),
            (
                format!("tcp://h:0{two}"),
                "\"0\" is not a number from 1 to 65535",
            ),
            (format!("tcp://h:65536{two}"), "\"65536\" is not a number"),
            (format!("tcp://:1{two}"), "\"\" is empty"),
            (format!("tcp://a b:1{two}"), "not a host name"),
            (format!("file://{two}"), "path is missing"),
            (format!("file://x/y{two}"), "not absolute"),
            (format!("env://host{two}"), "no host or path"),
            ("tcp://h:1".to_owned(), "rank is missing; add ?rank=N"),
            (
                "tcp://h:1".to_owned(),
                "world_size is missing; add ?world_size=N",
            ),
            ("tcp://h:1?rank=0".to_owned(), "world_size is missing"),
            ("file:///f?world_size=1".to_owned(), "rank is missing"),
            (
                "tcp://h:1?rank=x&world_size=2".to_owned(),
                "rank=\"x\" is not a number",
            ),
            (
                "tcp://h:1?rank=-1&world_size=2".to_owned(),
                "rank=\"-1\" is not a number",
            ),
            (
                "tcp://h:1?rank=2&world_size=2".to_owned(),
                "rank 2 is not below world_size 2",
            ),
            (
                "tcp://h:1?rank=0&world_size=0".to_owned(),
                "not below world_size 0",
            ),
            (
                "tcp://h:1?rank=0&rank=1&world_size=2".to_owned(),
                "rank is given twice",
            ),
            (
                "tcp://h:1?ranks=0".to_owned(),
                "\"ranks\" is unknown; known are rank",
            ),
        ] {
            let message = error(&url, None, None);
            assert!(message.contains(expected), "{url}: {message}");
        }
    }

    #[test]
    fn rank_and_world_size_are_given_once() {
        let message = error("tcp://h:1?rank=0&world_size=2", Some(0), None);
        assert!(
            message.contains("rank is given in the URL and as an argument"),
            "{message}"
        );
        let message = error("env://?world_size=2", None, Some(2));
        assert!(
            message.contains("world_size is given in the URL"),
            "{message}"
        );
    }
}
