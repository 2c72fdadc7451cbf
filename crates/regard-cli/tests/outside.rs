//! Bad surroundings: names that terminals obey, places where results must not go, disks that are
//! full, pipes in the place of files, and an end in the middle.
#![cfg(unix)]

mod support;

use regard_cases::{Spec, file};
use safetensors::SafeTensors;
use serde_json::Value;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::{command, directory, regard, run, text};

/// A small case in a file of that path.
fn write(path: &Path) {
    let case = Spec::new("some").lengths(&[(5, 70), (5, 33)]).heads(4, 2).dims(32, 16).generate();
    file::write(&case, path).expect("a case file");
}

/// Names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("a directory");
    let mut names: Vec<_> = entries
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Whether that is a whole result file.
fn is_whole(path: &Path) -> bool {
    let bytes = std::fs::read(path).expect("readable");
    SafeTensors::deserialize(&bytes).is_ok_and(|tensors| tensors.tensor("out").is_ok())
}

const OBEYED: &str = "\u{1b}[31m\u{7}\u{9b}2J\u{202e}red";

#[track_caller]
fn shows_only_itself(text: &str) {
    let obeyed = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
    assert!(!text.contains(obeyed), "{text:?}");
}

#[test]
fn names_that_terminals_obey_are_shown() {
    let directory = directory("names");
    let out = directory.join("out");
    let inputs = directory.join("in");
    std::fs::create_dir(&inputs).expect("a directory");
    let good = inputs.join(format!("{OBEYED}.safetensors"));
    write(&good);
    std::fs::write(inputs.join(format!("bad{OBEYED}.safetensors")), "no case").expect("a file");
    let missing = directory.join(format!("missing{OBEYED}"));

    for arguments in [
        &["check", text(&inputs), text(&missing)][..],
        &["check", text(&inputs), "--filter", OBEYED],
        &["run", text(&inputs), text(&missing), "--out", text(&out)],
        &["plan", text(&missing)],
        &["plan", "--shape", OBEYED],
        &["plan", "--shape", "hq=1 d=8 lq=1", "--machine", OBEYED],
        &["check", "--cases", OBEYED],
        &["check", text(&good), "--device", OBEYED],
        &["check", text(&good), "--rows", OBEYED],
        &["bench", OBEYED],
        &["bench", "--from", text(&missing)],
        &["bench", "--shape", OBEYED],
        &[OBEYED],
        &[&format!("--{OBEYED}")],
    ] {
        let ran = regard(arguments);
        assert!(ran.status == 1 || ran.status == 2, "{arguments:?}: {}", ran.status);
        shows_only_itself(&ran.stdout);
        shows_only_itself(&ran.stderr);
        // The parser of the command line drops colours by itself.
        assert!(
            ran.stdout.contains("\\u{9b}2J") || ran.stderr.contains("\\u{9b}2J"),
            "{}",
            ran.stderr
        );
    }
    for arguments in [
        &["check", text(&inputs), "--json"][..],
        &["run", text(&inputs), "--out", text(&out), "--json"],
    ] {
        let ran = regard(arguments);
        shows_only_itself(&ran.stdout);
        let report: Value = serde_json::from_str(&ran.stdout).expect("JSON");
        let found = report.to_string();
        assert!(
            report["failed"] == 1 && found.contains(&serde_json::json!(text(&good)).to_string()),
            "{found}"
        );
    }
    let wish = run(command(&["info"]).env("REGARD_SIMD", OBEYED));
    assert_eq!(wish.status, 2);
    shows_only_itself(&wish.stderr);
}

#[test]
fn results_do_not_go_where_cases_are_read() {
    let directory = directory("inside");
    let inputs = directory.join("in");
    std::fs::create_dir_all(inputs.join("below")).expect("directories");
    write(&inputs.join("some.safetensors"));
    write(&inputs.join("below/other.safetensors"));
    symlink(&inputs, directory.join("link")).expect("a link");
    let before = names(&inputs);
    let refused = |at: &Path, input: &str, out: &str| {
        let ran = run(command(&["run", input, "--out", out]).current_dir(at));
        ran.failed(2, &[&format!("`--out` is {out}"), "allowed: a directory "]);
        assert_eq!(names(&inputs), before);
    };
    refused(&inputs, ".", "results");
    refused(&inputs, ".", "new/../results");
    refused(&directory, "in", "in/below/results");
    refused(&directory, "in", "link/results");
    refused(&directory, "link", "in/results");
    refused(&directory, ".", "results");
    // Above it: the results of below/ would be in it again.
    std::fs::create_dir(inputs.join("in")).expect("a directory");
    write(&inputs.join("in/third.safetensors"));
    let before = names(&inputs);
    let ran = run(command(&["run", "in", "--out", "."]).current_dir(&directory));
    ran.failed(2, &["`--out` is .", "inside of the input directory in"]);
    assert_eq!(names(&inputs), before);

    // A file that is named is no directory that is read, and a directory beside is none either.
    let beside = run(
        command(&["run", "in/some.safetensors", "--out", "in/results"]).current_dir(&directory)
    );
    assert_eq!(beside.done(), "1 written, 0 failed\n");
    std::fs::remove_dir_all(inputs.join("results")).expect("removed");
    for _ in 0..2 {
        let beside = run(command(&["run", "in", "--out", "in-results"]).current_dir(&directory));
        assert_eq!(beside.done(), "3 written, 0 failed\n");
    }
}

#[test]
fn an_input_with_a_second_name_stays() {
    let directory = directory("hard-link");
    let (input, out) = (directory.join("some.safetensors"), directory.join("out"));
    write(&input);
    std::fs::create_dir(&out).expect("a directory");
    std::fs::hard_link(&input, out.join("some.safetensors")).expect("a hard link");
    let before = std::fs::read(&input).expect("readable");
    assert_eq!(regard(&["run", text(&input), "--out", text(&out)]).done(), "1 written, 0 failed\n");
    assert_eq!(std::fs::read(&input).expect("readable"), before);
    assert!(is_whole(&out.join("some.safetensors")));
    assert_eq!(names(&out), ["some.safetensors"]);
    // The permissions of any new file: all that the process's mask allows.
    let fresh = directory.join("fresh");
    std::fs::write(&fresh, "").expect("a file");
    let mode = |path: &Path| {
        std::os::unix::fs::PermissionsExt::mode(&path.metadata().expect("there").permissions())
    };
    assert_eq!(mode(&out.join("some.safetensors")), mode(&fresh));
}

#[test]
fn failed_write_keeps_the_old_file() {
    let directory = directory("full");
    let (input, out) = (directory.join("some.safetensors"), directory.join("out"));
    write(&input);
    assert_eq!(regard(&["run", text(&input), "--out", text(&out)]).done(), "1 written, 0 failed\n");
    let before = std::fs::read(out.join("some.safetensors")).expect("a result");
    // The system refuses to make files longer than a block, as it does when the disk is full;
    // results are longer.
    let mut limited = Command::new("sh");
    limited.args([
        "-c",
        "trap '' XFSZ; ulimit -f 1; exec \"$@\"",
        "sh",
        env!("CARGO_BIN_EXE_regard"),
    ]);
    let ran = run(limited.args(["run", text(&input), "--out", text(&out)]));
    ran.failed(1, &["some.safetensors: ", "not writable"]);
    assert_eq!(ran.stdout, "0 written, 1 failed\n");
    assert_eq!(std::fs::read(out.join("some.safetensors")).expect("a result"), before);
    assert_eq!(names(&out), ["some.safetensors"]);

    let mut closed = command(&["info"]);
    if let Ok(full) = std::fs::OpenOptions::new().write(true).open("/dev/full") {
        run(closed.stdout(full)).failed(1, &["cannot write the output"]);
    }
}

#[test]
fn an_end_in_the_middle_leaves_whole_files() {
    let directory = directory("interrupted");
    let (inputs, out) = (directory.join("in"), directory.join("out"));
    std::fs::create_dir(&inputs).expect("a directory");
    for i in 0..3000 {
        write(&inputs.join(format!("{i}.safetensors")));
    }
    // On a busy machine all files may be written before this process looks again.
    // TERM, because a shell lets the jobs of its background ignore INT.
    let interrupted = (0..10).any(|_| {
        let _ = std::fs::remove_dir_all(&out);
        let mut child = command(&["run", text(&inputs), "--out", text(&out)])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the command starts");
        let started = Instant::now();
        while !(out.is_dir() && names(&out).len() > 20)
            && started.elapsed() < Duration::from_secs(60)
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        let id = child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().expect("kill").success());
        child.wait().expect("ends").code().is_none()
    });
    assert!(interrupted, "all {} were written before", names(&out).len());
    let found = names(&out);
    let (results, others): (Vec<_>, Vec<_>) =
        found.iter().partition(|name| name.ends_with(".safetensors"));
    assert!(!results.is_empty() && results.iter().all(|name| is_whole(&out.join(name))));
    assert!(
        others.iter().all(|name| name.starts_with(".regard-") && name.ends_with(".tmp")),
        "{others:?}"
    );
}

#[test]
fn pipes_and_devices_are_refused_without_blocking() {
    let directory = directory("pipes");
    let pipe = directory.join("pipe.safetensors");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    write(&directory.join("some.safetensors"));
    symlink("around.safetensors", directory.join("around.safetensors")).expect("a link to itself");
    symlink(".", directory.join("again")).expect("a link to its directory");
    let ran = regard(&["check", text(&directory), "/dev/zero"]);
    assert_eq!((ran.status, ran.stderr.as_str()), (1, ""));
    let line = |name: &str| ran.stdout.lines().find(|line| line.contains(name)).unwrap_or_default();
    assert!(line("pipe.safetensors").contains("unreadable (no regular file)"), "{}", ran.stdout);
    assert!(line("/dev/zero").contains("unreadable (no regular file)"), "{}", ran.stdout);
    assert!(line("around.safetensors").starts_with("FAIL "), "{}", ran.stdout);
    assert!(ran.stdout.ends_with("1 passed, 3 failed\n"), "{}", ran.stdout);
    let ran = regard(&["plan", text(&pipe)]);
    ran.failed(1, &["unreadable (no regular file)", "a case file"]);
}

#[test]
fn files_that_memory_cannot_hold() {
    let directory = directory("huge");
    let path = directory.join("huge.safetensors");
    // Holes only: it takes no room on the disk.
    let made = std::fs::File::create(&path).and_then(|file| file.set_len(1 << 42));
    if made.is_err() {
        eprintln!("SKIPPED: this file system has no files of 4 TiB");
        return;
    }
    let ran = regard(&["check", text(&path)]);
    assert!(
        ran.stdout.contains("`memory` is 8.0 TiB for this file; allowed: at most "),
        "{}",
        ran.stdout
    );
    assert_eq!((ran.status, ran.stderr.as_str()), (1, ""));
    std::fs::remove_file(&path).expect("removed");
}

#[test]
fn words_after_an_option_are_its_value() {
    regard(&["check", "--cases", "nothing/"]).failed(2, &["`--cases` is \"nothing/\"", "lengths"]);
    let shown = regard(&["check", "--cases", "trees/"]);
    assert!(shown.done().lines().rev().skip(1).all(|line| line.starts_with("ok   trees/")));
    let directory = directory("words");
    let path = directory.join("some.safetensors");
    write(&path);
    // A file in the place of the prefix is no reason to check everything.
    regard(&["check", "--cases", text(&path)]).failed(2, &["`--cases` is \"", "some.safetensors"]);
    let both = regard(&["check", text(&path), "--cases", "--filter", "outside-words"]);
    assert_eq!(both.done().lines().last(), Some("1 passed, 0 failed"));
}

#[test]
fn devices_that_are_none() {
    for device in ["", "CPU", "cpu:0", "cpu:", "tpu", "metal:1", ":", "cuda0", "gpu", "-"] {
        let ran = regard(&["check", "x", &format!("--device={device}")]);
        ran.failed(2, &[&format!("`device` is \"{device}\"")]);
    }
    for device in ["cuda:", "cuda:-1", "cuda:x", "cuda:99999999999999999999999", "cuda:0:0"] {
        let ran = regard(&["check", "x", &format!("--device={device}")]);
        assert!(ran.status == 2 || ran.status == 3, "{device}: {}{}", ran.stdout, ran.stderr);
        assert!(
            ran.stderr.starts_with("error: ") && ran.stderr.lines().count() == 1,
            "{}",
            ran.stderr
        );
    }
}
