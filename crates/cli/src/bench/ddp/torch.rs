//! PyTorch's DistributedDataParallel on gloo, doing the same.

use std::process::Command;

use phalanx_store::TcpStoreServer;

use super::{Args, Figures, KEEP_MEMORY, finish, start};
use crate::Failure;

const SCRIPT: &str = include_str!("torch_ddp.py");

pub(super) fn measure(python: &str, args: &Args) -> Result<Figures, Failure> {
    let server = TcpStoreServer::start(&["127.0.0.1:0".parse()?], None)?;
    let lens = serde_json::to_string(&args.params.lens())?;
    let mut ranks = Vec::with_capacity(args.ranks);
    for rank in 0..args.ranks {
        let mut command = Command::new(python);
        command
            .args([
                "-c",
                SCRIPT,
                &args.rounds.to_string(),
                &args.view.to_string(),
            ])
            .env("BENCH_LENS", &lens)
            .envs(KEEP_MEMORY)
            .env("TORCH_CPP_LOG_LEVEL", "ERROR")
            .env("OMP_NUM_THREADS", "1");
        ranks.push(start(command, rank, args.ranks, server.local_addr())?);
    }
    let outputs = finish(ranks)?;
    Ok(serde_json::from_str(outputs[0].trim())?)
}
