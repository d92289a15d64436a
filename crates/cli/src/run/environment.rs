//! The variables of one rank: those that PyTorch's launcher sets, and the job's token.

use super::message::Share;

/// What the ranks of a job have in common.
#[derive(Debug, Clone)]
pub(super) struct Job {
    pub(super) master_addr: String,
    pub(super) run_id: String,
    pub(super) max_restarts: usize,
    /// `None`: PyTorch's processes may take part, and everybody else who reaches the store.
    pub(super) token: Option<String>,
}

/// Variables to set, and with `None` to remove.
pub(super) type Variables = Vec<(&'static str, Option<String>)>;

/// The variables of a rank by its number on this node.
///
/// `is_set` tells which ones the user has chosen; of those that are only defaults none is changed.
pub(super) fn of_rank(
    job: &Job,
    share: &Share,
    local: usize,
    is_set: impl Fn(&str) -> bool,
) -> Variables {
    let rank = (share.first_rank + local).to_string();
    let world_size = share.world_size.to_string();
    let text = |value: &str| Some(value.to_owned());
    let mut variables = vec![
        ("RANK", Some(rank.clone())),
        ("WORLD_SIZE", Some(world_size.clone())),
        ("LOCAL_RANK", Some(local.to_string())),
        ("LOCAL_WORLD_SIZE", Some(share.nproc.to_string())),
        ("GROUP_RANK", Some(share.node.to_string())),
        ("GROUP_WORLD_SIZE", Some(share.nnodes.to_string())),
        ("ROLE_NAME", text("default")),
        ("ROLE_RANK", Some(rank)),
        ("ROLE_WORLD_SIZE", Some(world_size)),
        ("MASTER_ADDR", text(&job.master_addr)),
        ("MASTER_PORT", Some(share.store_port.to_string())),
        (
            "TORCHELASTIC_RESTART_COUNT",
            Some(share.attempt.to_string()),
        ),
        (
            "TORCHELASTIC_MAX_RESTARTS",
            Some(job.max_restarts.to_string()),
        ),
        ("TORCHELASTIC_RUN_ID", text(&job.run_id)),
        ("TORCHELASTIC_USE_AGENT_STORE", text("True")),
        (phalanx_store::token::TOKEN_VAR, job.token.clone()),
    ];
    let defaults = [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", true),
        // Otherwise every rank takes all cores for itself.
        ("OMP_NUM_THREADS", share.nproc > 1),
    ];
    for (name, applies) in defaults {
        if applies && !is_set(name) {
            variables.push((name, text("1")));
        }
    }
    variables
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_store::rendezvous::{Launcher, LauncherEnv, MeetingPoint};

    fn job() -> Job {
        Job {
            master_addr: "node0".into(),
            run_id: "job7".into(),
            max_restarts: 3,
            token: Some("secret".into()),
        }
    }

    const SHARE: Share = Share {
        attempt: 2,
        store_port: 4711,
        node: 1,
        nnodes: 2,
        first_rank: 4,
        nproc: 2,
        world_size: 6,
        alone_on_host: true,
    };

    fn find(variables: &Variables, name: &str) -> Option<String> {
        let found = variables.iter().find(|(known, _)| *known == name);
        found.and_then(|(_, value)| value.clone())
    }

    #[test]
    fn the_rendezvous_understands_them() {
        let variables = of_rank(&job(), &SHARE, 1, |_| false);
        let env = LauncherEnv::from_lookup(&|name| find(&variables, name)).unwrap();
        assert_eq!((env.rank, env.world_size), (5, 6));
        assert_eq!((env.local_rank, env.local_world_size), (Some(1), Some(2)));
        assert_eq!((env.node_rank, env.num_nodes), (Some(1), Some(2)));
        assert_eq!(env.restart_count, 2);
        assert_eq!(env.run_id.as_deref(), Some("job7"));
        assert_eq!(env.launcher, Launcher::Torchrun);
        let MeetingPoint::Tcp {
            host,
            port,
            agent_hosted,
        } = env.meeting
        else {
            panic!("{:?}", env.meeting);
        };
        assert_eq!((host.as_str(), port, agent_hosted), ("node0", 4711, true));
    }

    #[test]
    fn what_the_user_chose_stays_and_a_token_that_is_not_wanted_goes() {
        let open = Job {
            token: None,
            ..job()
        };
        let chosen = of_rank(&open, &SHARE, 0, |name| name == "OMP_NUM_THREADS");
        assert_eq!(find(&chosen, "OMP_NUM_THREADS"), None);
        assert!(chosen.contains(&("PHALANX_TOKEN", None)));
        let defaults = of_rank(&job(), &SHARE, 0, |_| false);
        assert_eq!(find(&defaults, "OMP_NUM_THREADS").as_deref(), Some("1"));
        assert_eq!(find(&defaults, "PHALANX_TOKEN").as_deref(), Some("secret"));
        let alone = Share { nproc: 1, ..SHARE };
        let alone = of_rank(&job(), &alone, 0, |_| false);
        assert_eq!(find(&alone, "OMP_NUM_THREADS"), None);
    }
}
