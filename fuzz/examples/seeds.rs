//! Writes the seed corpus: `cargo run --example seeds` in this folder.

#[path = "../../crates/regard-cases/tests/seeds/mod.rs"]
mod seeds;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/case_file");
    std::fs::create_dir_all(&folder)?;
    for case in seeds::cases() {
        regard_cases::file::write(&case, folder.join(format!("{}.safetensors", case.name)))?;
    }
    println!("{} files in {}", seeds::cases().len(), folder.display());
    Ok(())
}
