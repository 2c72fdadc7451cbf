//! The built libraries, seen from outside: from C, from C++, from Python, and by their symbols.

mod libraries;

use libraries::{Libraries, folder, libraries, succeed};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder for the files of this test.
fn scratch() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
}

/// Whether a program that the test needs is here. If not, the test prints so and passes; CI has all
/// but maybe a C++ compiler.
fn is_here(program: &str) -> bool {
    let here =
        Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
    if !here {
        assert!(program == "c++" || std::env::var_os("CI").is_none(), "CI has no {program}");
        eprintln!("SKIPPED: there is no {program} here");
    }
    here
}

/// A compiler with every warning an error, the header on its path.
fn compiler(name: &str, standard: &str) -> Command {
    let mut command = Command::new(name);
    command
        .args([standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"])
        .arg(folder().join("include"));
    command
}

/// Compiles C source against the shared library and against the static one, runs both, and returns
/// the output of the first.
fn compile_and_run(name: &str, source: &Path) -> String {
    compile_and_run_as("cc", "-std=c11", "c", name, source)
}

/// Likewise, with a compiler and as a language.
fn compile_and_run_as(
    compiler_name: &str,
    standard: &str,
    language: &str,
    name: &str,
    source: &Path,
) -> String {
    let Libraries { shared, fixed } = libraries();
    let mut printed = Vec::new();
    for (kind, library) in [("shared", shared), ("static", fixed)] {
        let program = scratch().join(format!("{name}_{kind}"));
        let mut compile = compiler(compiler_name, standard);
        compile
            .args(["-x", language])
            .arg(source)
            .args(["-x", "none"])
            .arg(library)
            .args(["-lm", "-lpthread", "-ldl", "-o"])
            .arg(&program);
        if kind == "shared" {
            compile.arg(format!(
                "-Wl,-rpath,{}",
                library.parent().expect("a file in a folder").display()
            ));
        }
        succeed(&mut compile);
        printed
            .push(String::from_utf8(succeed(&mut Command::new(&program)).stdout).expect("UTF-8"));
    }
    printed.swap_remove(0)
}

#[test]
fn a_c_program_gets_results_errors_and_refusals() {
    if is_here("cc") {
        let printed = compile_and_run("abi", &folder().join("tests/c/abi.c"));
        assert!(printed.ends_with("all as expected\n"), "{printed}");
    }
}

#[test]
fn caches_in_8_bits_run_from_c() {
    if is_here("cc") {
        let printed = compile_and_run("caches", &folder().join("tests/c/caches.c"));
        assert!(printed.ends_with("all as expected\n"), "{printed}");
    }
}

#[cfg(unix)]
#[test]
fn a_hostile_program_gets_errors_and_nothing_else() {
    let source = folder().join("tests/c/hostile.c");
    if is_here("cc") {
        let printed = compile_and_run("hostile", &source);
        assert!(printed.ends_with("all as expected\n"), "{printed}");
    }
    if is_here("c++") {
        let printed = compile_and_run_as("c++", "-std=c++11", "c++", "hostile_cpp", &source);
        assert!(printed.ends_with("all as expected\n"), "{printed}");
    }
}

#[test]
fn an_engine_in_cpp_steps_over_the_interface() {
    if is_here("c++") {
        let source = folder().join("tests/c/engine.cpp");
        let printed = compile_and_run_as("c++", "-std=c++11", "c++", "engine", &source);
        assert!(printed.contains("refused: `kv_lens[0]` is"), "{printed}");
        assert!(printed.ends_with("all as expected\n"), "{printed}");
    }
}

/// The first block of C in the guide.
fn program_of_the_guide() -> String {
    let guide = std::fs::read_to_string(folder().join("../../docs/c-abi.md")).expect("the guide");
    let (_, rest) = guide.split_once("```c\n").expect("a program in the guide");
    rest.split_once("```").expect("its end").0.to_string()
}

#[test]
fn the_program_of_the_guide_does_what_it_says() {
    if is_here("cc") {
        let source = scratch().join("guide.c");
        std::fs::write(&source, program_of_the_guide()).expect("a writable folder");
        let printed = compile_and_run("guide", &source);
        assert!(printed.contains("kernel ") && printed.ends_with("out[0] = 1.000\n"), "{printed}");
    }
}

#[test]
fn the_header_is_c99_and_cpp() {
    if is_here("cc") {
        succeed(
            compiler("cc", "-std=c99")
                .args(["-fsyntax-only", "-x", "c"])
                .arg(folder().join("include/regard.h")),
        );
    }
    if is_here("c++") {
        let program = folder().join("tests/c/abi.c");
        for standard in ["-std=c++11", "-std=c++20"] {
            succeed(compiler("c++", standard).args(["-fsyntax-only", "-x", "c++"]).arg(&program));
            succeed(
                compiler("c++", standard)
                    .args(["-fsyntax-only", "-x", "c++"])
                    .arg(folder().join("include/regard.h")),
            );
        }
    }
}

#[test]
fn python_gets_the_same_as_its_own_maths() {
    if is_here("python3") {
        let script = folder().join("tests/ctypes_abi.py");
        let output = succeed(Command::new("python3").arg(script).arg(&libraries().shared));
        let printed = String::from_utf8_lossy(&output.stdout);
        print!("{printed}");
        assert!(printed.ends_with("all as expected\n"), "{printed}");
    }
}

#[test]
fn nothing_but_the_interface_is_exported() {
    if !cfg!(target_os = "linux") {
        eprintln!("SKIPPED: the symbols of a shared library are read on Linux only");
        return;
    }
    if is_here("nm") {
        let mut list = Command::new("nm");
        list.args(["--dynamic", "--defined-only", "--format=posix"]).arg(&libraries().shared);
        let output = String::from_utf8(succeed(&mut list).stdout).expect("UTF-8");
        let mut exported: Vec<_> =
            output.lines().filter_map(|line| line.split(' ').next()).collect();
        exported.sort_unstable();

        let header =
            std::fs::read_to_string(folder().join("include/regard.h")).expect("the header");
        let name = |part: &str| {
            part.rsplit(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().map(String::from)
        };
        let declared = |line: &str| {
            let before = line.split_once('(')?.0;
            let starts = [
                "const char *regard",
                "regard_status regard",
                "void regard",
                "size_t regard",
                "uint32_t regard",
            ];
            starts.iter().any(|start| line.starts_with(start)).then(|| name(before)).flatten()
        };
        let mut expected: Vec<_> = header.lines().filter_map(declared).collect();
        expected.sort_unstable();
        assert!(expected.len() > 8, "{expected:?}");
        assert_eq!(exported, expected);
    }
}
