//! The table in `docs/backends.md` says what the backends say of themselves.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx::pg::{CallKind, Capabilities, DType, PeerDeath, ReduceOp};
use phalanx_tests::world_for;

/// A backend's column: what stands in which row.
type Column = BTreeMap<String, String>;

/// Which of all are known: by their names, or by those of the few that are not.
fn listed<T: Copy>(all: &[T], known: impl Fn(T) -> bool, name: impl Fn(T) -> String) -> String {
    let (known, missing): (Vec<T>, Vec<T>) = all.iter().partition(|&&one| known(one));
    let names = |list: Vec<T>| list.into_iter().map(&name).collect::<Vec<_>>().join(" ");
    match (known.len(), missing.len()) {
        (_, 0) => "all".into(),
        (0, _) => "none".into(),
        (_, 1..=3) => format!("all but {}", names(missing)),
        _ => names(known),
    }
}

/// Operators that some types do not have, though both are known.
fn lacks(known: &Capabilities) -> String {
    let pair = |(dtype, op): &(DType, ReduceOp)| format!("{} of {dtype}", op.name());
    match known.lacks {
        [] => "none".into(),
        pairs => pairs.iter().map(pair).collect::<Vec<_>>().join(", "),
    }
}

fn column_of(known: &Capabilities) -> Column {
    let types = |dtype| known.dtypes.contains(dtype);
    let types = listed(&DType::ALL, types, |dtype| dtype.to_string());
    let yes = |is_so: bool| if is_so { "yes" } else { "no" }.to_owned();
    let calls = CallKind::ALL.into_iter().map(|call| {
        let cell = match (call, known.calls.contains(call)) {
            (CallKind::Barrier, known) => yes(known),
            (_, true) => types.clone(),
            (_, false) => "no".into(),
        };
        (call.to_string(), cell)
    });
    let ops = |op| known.ops.contains(op);
    let ops = listed(&ReduceOp::ALL, ops, |op| op.name().to_owned());
    let death = match known.on_peer_death {
        PeerDeath::Error => "an error that names it",
        PeerDeath::Timeout => "an error at the timeout",
        PeerDeath::JobEnds => "the launcher ends the job",
        _ => "unknown",
    };
    let others = [
        ("operators", ops),
        ("not together", lacks(known)),
        ("host memory", yes(known.cpu)),
        ("CUDA memory", yes(known.cuda)),
        ("receives from anybody", yes(known.recv_any)),
        ("messages have tags", yes(known.tags)),
        (
            "sums do not depend on how a vector is cut",
            yes(known.fixed_order),
        ),
        (
            "on one host, large buffers are reduced where they are",
            yes(known.scattered),
        ),
        ("an abort ends what is in progress", yes(known.abort)),
        ("a rank dies", death.into()),
    ];
    let others = others.map(|(row, cell)| (row.to_owned(), cell));
    calls.chain(others).collect()
}

/// The columns of the table below this line, by the names at their heads.
fn columns_below(text: &str, line: &str) -> BTreeMap<String, Column> {
    let (_, below) = text.split_once(line).expect("the table is there");
    let rows: Vec<Vec<String>> = below
        .lines()
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'))
        .filter(|line| !line.starts_with("|--"))
        .map(|line| {
            let cells = line.trim_matches('|').split('|');
            cells.map(|cell| cell.trim().to_owned()).collect()
        })
        .collect();
    let (heads, rows) = rows.split_first().expect("a row with names");
    let column = |at: usize| {
        rows.iter()
            .map(move |row| (row[0].clone(), row[at].clone()))
    };
    let columns = heads.iter().enumerate().skip(1);
    columns
        .map(|(at, head)| (head.clone(), column(at).collect()))
        .collect()
}

fn documented() -> BTreeMap<String, Column> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/backends.md");
    let text = std::fs::read_to_string(file).expect("docs/backends.md");
    columns_below(&text, "## What each can do")
}

/// The head of the column of what was not run on a GPU.
const NCCL: &str = "nccl (emulated)";

/// Whether the column with this head says what a backend says of itself.
fn check_column(head: &str, known: &Capabilities) {
    let own = column_of(known);
    let written = documented().remove(head);
    let written = written.unwrap_or_else(|| panic!("no column {head}"));
    for (row, cell) in &own {
        let text = written.get(row).map(String::as_str);
        assert_eq!(text, Some(cell.as_str()), "{head} in row {row:?}");
    }
    assert_eq!(own.len(), written.len(), "rows that mean nothing");
}

#[test]
fn the_documented_table_is_what_the_backends_say() {
    // A group of nccl's needs a device; its own tests see that groups say the same.
    let with_host_memory = |backend: &String| backend != "nccl";
    for backend in phalanx::backends().into_iter().filter(with_host_memory) {
        world_for(&backend, 1).run(|_| {
            let group = phalanx::init().unwrap();
            check_column(group.backend(), &group.capabilities());
            group.shutdown().unwrap();
        });
    }
}

#[test]
fn the_documented_table_is_what_nccl_says() {
    check_column(NCCL, &phalanx_nccl::capabilities());
}

#[cfg(feature = "mpi")]
#[test]
fn ranks_under_mpirun_need_no_store_and_no_address() {
    use phalanx::prelude::*;

    let world = world_for("mpi", 3);
    let without = ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"];
    let world = without
        .into_iter()
        .fold(world, |world, name| world.env_remove(name));
    world.run(|ctx| {
        let group = phalanx::init().unwrap();
        assert_eq!((group.rank(), group.size()), (ctx.rank(), 3));
        let mut values = [1.0f32];
        group
            .allreduce_in_place(&mut values, ReduceOp::Sum)
            .unwrap();
        assert_eq!(values, [3.0]);
        group.shutdown().unwrap();
    });
}

#[test]
fn every_backend_of_the_facade_has_a_column() {
    let columns = documented();
    let columns: Vec<&str> = columns.keys().map(String::as_str).collect();
    assert_eq!(columns, ["gloo", "mpi", "native", NCCL, "reference"]);
}

#[test]
fn a_wrong_cell_is_found() {
    let text = "## T\n\n| call | a | b |\n|--|--|--|\n| send | all | no |\n\n| x |\n";
    let columns = columns_below(text, "## T");
    assert_eq!(columns["a"]["send"], "all");
    assert_eq!(columns["b"]["send"], "no");
    let mut known = Capabilities::all_on_host();
    known.calls = known.calls.without(CallKind::Send);
    assert_eq!(column_of(&known)["send"], "no");
    assert_eq!(column_of(&known)["recv"], "all");
    known.dtypes = known.dtypes.without(DType::I16);
    assert_eq!(column_of(&known)["recv"], "all but i16");
}
