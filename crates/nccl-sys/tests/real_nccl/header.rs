//! The table against `nccl.h`: a C program made of assertions, which a compiler checks.

use std::fmt::Write as _;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

use nccl_sys::*;

use crate::dir;

/// Rust's spelling of a type as C's.
fn c_type(rust: &str) -> String {
    if let Some(inner) = rust.strip_prefix("*mut ") {
        return format!("{}*", c_type(inner));
    }
    if let Some(inner) = rust.strip_prefix("*const ") {
        return format!("const {}*", c_type(inner));
    }
    match rust {
        "c_int" => "int",
        "c_char" => "char",
        "c_void" => "void",
        "usize" => "size_t",
        "u64" => "uint64_t",
        other => other,
    }
    .to_owned()
}

/// The header needs these three files of CUDA's, of which it uses two names.
fn stand_ins(dir: &Path) {
    let runtime = "#define CUDART_VERSION 0\n\
                   typedef struct CUstream_st* cudaStream_t;\n\
                   typedef struct CUevent_st* cudaEvent_t;\n";
    std::fs::write(dir.join("cuda_runtime.h"), runtime).unwrap();
    std::fs::write(dir.join("cuda_fp16.h"), "").unwrap();
}

fn compile(program: &str) -> Result<(), String> {
    let work = tempfile::tempdir().unwrap();
    stand_ins(work.path());
    let source = work.path().join("check.c");
    std::fs::write(&source, program).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let output = Command::new(&compiler)
        .args(["-std=c11", "-fsyntax-only", "-I"])
        .arg(work.path())
        .arg("-I")
        .arg(dir().join("include"))
        .arg(&source)
        .output()
        .unwrap_or_else(|err| panic!("{compiler}: {err}; a C compiler is needed"));
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

fn begin() -> String {
    "#include <stddef.h>\n#include \"nccl.h\"\n".into()
}

fn assert_that(program: &mut String, condition: &str, what: &str) {
    writeln!(program, "_Static_assert({condition}, \"{what}\");").unwrap();
}

fn assert_signature(program: &mut String, signature: &Signature) {
    let args: Vec<String> = signature.args.iter().map(|arg| c_type(arg)).collect();
    let (name, result) = (signature.name, c_type(signature.result));
    let written = format!("{result}({})", args.join(", "));
    let same = format!("__builtin_types_compatible_p(__typeof__({name}), {written})");
    assert_that(program, &same, name);
}

#[test]
fn real_nccl_header_has_the_functions_of_the_table() {
    let mut program = begin();
    for signature in SIGNATURES {
        assert_signature(&mut program, signature);
    }
    println!("{} functions", SIGNATURES.len());
    compile(&program).unwrap_or_else(|errors| panic!("{errors}\n{program}"));
}

#[test]
fn real_nccl_header_refuses_a_wrong_signature() {
    let mut wrong = *SIGNATURES
        .iter()
        .find(|signature| signature.name == "ncclCommCount")
        .unwrap();
    wrong.args = &["ncclComm_t", "*mut u64"];
    let mut program = begin();
    assert_signature(&mut program, &wrong);
    let errors = compile(&program).unwrap_err();
    assert!(errors.contains("ncclCommCount"), "{errors}");
}

#[test]
fn real_nccl_header_has_the_values_of_the_codes() {
    let mut program = begin();
    let codes = [
        ncclResult_t::KNOWN,
        ncclDataType_t::KNOWN,
        ncclRedOp_t::KNOWN,
        ncclScalarResidence_t::KNOWN,
        ncclCommMemStat_t::KNOWN,
    ];
    for (name, value) in codes.concat() {
        assert_that(&mut program, &format!("{name} == {value}"), name);
    }
    let numbers = [
        ("NCCL_UNIQUE_ID_BYTES", NCCL_UNIQUE_ID_BYTES as i64),
        ("NCCL_CONFIG_UNDEF_INT", NCCL_CONFIG_UNDEF_INT.into()),
        ("NCCL_SPLIT_NOCOLOR", NCCL_SPLIT_NOCOLOR.into()),
        ("NCCL_SHRINK_DEFAULT", NCCL_SHRINK_DEFAULT.into()),
        ("NCCL_SHRINK_ABORT", NCCL_SHRINK_ABORT.into()),
        ("NCCL_REVOKE_DEFAULT", NCCL_REVOKE_DEFAULT.into()),
        ("NCCL_API_MAGIC", NCCL_API_MAGIC.into()),
    ];
    for (name, value) in numbers {
        assert_that(&mut program, &format!("{name} == {value}LL"), name);
    }
    compile(&program).unwrap_or_else(|errors| panic!("{errors}\n{program}"));
}

/// Name, size and offset of fields.
macro_rules! fields {
    ($type:ident: $($field:ident),*) => {
        [$((stringify!($field), offset_of!($type, $field))),*]
    };
}

#[test]
fn real_nccl_header_lays_structures_out_as_we_do() {
    let mut program = begin();
    let config = fields!(ncclConfig_t: size, magic, version, blocking, cgaClusterSize, minCTAs,
        maxCTAs, netName, splitShare, trafficClass, commName, collnetEnable, CTAPolicy,
        shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched, graphUsageMode, numRmaCtx);
    for (field, offset) in config {
        let same = format!("offsetof(ncclConfig_t, {field}) == {offset}");
        assert_that(&mut program, &same, field);
    }
    let simulated = fields!(ncclSimInfo_t: size, magic, version, estimatedTime);
    for (field, offset) in simulated {
        let same = format!("offsetof(ncclSimInfo_t, {field}) == {offset}");
        assert_that(&mut program, &same, field);
    }
    // Later versions append fields, which `size` tells the library that we do not have.
    let sizes = [
        ("ncclConfig_t", size_of::<ncclConfig_t>(), ">="),
        ("ncclSimInfo_t", size_of::<ncclSimInfo_t>(), "=="),
        ("ncclUniqueId", size_of::<ncclUniqueId>(), "=="),
        ("ncclResult_t", size_of::<ncclResult_t>(), "=="),
        ("ncclDataType_t", size_of::<ncclDataType_t>(), "=="),
        ("ncclRedOp_t", size_of::<ncclRedOp_t>(), "=="),
    ];
    for (name, size, relation) in sizes {
        let same = format!("sizeof({name}) {relation} {size}");
        assert_that(&mut program, &same, name);
    }
    compile(&program).unwrap_or_else(|errors| panic!("{errors}\n{program}"));
}
