//! Makes the stubs. An application needs two files, and the include root is the folder above `slipstream/v1`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = std::env::var("SLIPSTREAM_PROTOS").unwrap_or("../../protos".into());
    println!("cargo:rerun-if-changed={root}");
    let files = ["types", "gateway"].map(|name| format!("{root}/slipstream/v1/{name}.proto"));
    tonic_prost_build::configure().build_server(false).compile_protos(&files, &[root])?;
    Ok(())
}
