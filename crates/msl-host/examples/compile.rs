//! Compiles a file of MSL for the host and type-checks it with real address spaces: `cargo run -p
//! msl-host --example compile FILE`.

use msl_host::{Build, Compiler};

fn main() {
    let path = std::env::args().nth(1).expect("the path of an MSL file");
    let source = std::fs::read_to_string(&path).expect("a readable file");
    let compiler = Compiler::new(std::env::temp_dir().join("msl-host")).expect("clang");
    let result = compiler
        .typecheck("source.metal", &source)
        .and_then(|()| compiler.library("source.metal", &source, Build::Plain));
    match result {
        Ok(library) => println!("{}", library.generated().kernels.join("\n")),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}
