#!/usr/bin/env python3
"""Checks that Markdown has one sentence per line, outside of tables and code: `scripts/markdown.py [FILE...]`.

Without files it takes every Markdown file that git tracks, and checks that the files exist that the check-lists of
CONTRIBUTING.md, docs/architecture.md and docs/backends.md name, and that the examples of the READMEs are tested ones. `--fix` rewrites the files instead."""

import re
import subprocess
import sys

# Tables that programs print, and the history.
NOT_PROSE = [":!bench/results/*/table.md", ":!CHANGELOG.md"]
NAMED = re.compile(r"`([\w./-]+\.(?:rs|cuh|cu|metal|md|h|c|py|txt|sh|dict))`")
MARKER = re.compile(r"^( *)([-*]|\d+\.) +")
END = re.compile(r"(?<!\.\.)(?<!e\.g)(?<!i\.e)(?<!vs)[.!?](?:[)\"'*_]|\]\([^)]*\)|\])* +(?=\S)")


def sentences(text):
    """Splits a paragraph at the ends of its sentences. Inline code never ends one."""
    hidden = re.sub(r"`+[^`]*`+", lambda code: "x" * len(code[0]), text)
    start = 0
    for end in END.finditer(hidden):
        yield text[start : end.end()].rstrip()
        start = end.end()
    yield text[start:]


def reflow(lines):
    """The same document with one sentence per line."""
    out, paragraph, lead, indent = [], [], "", ""

    def flush():
        nonlocal paragraph
        if paragraph:
            # The marker of a list is not a sentence: "1. One." is one line.
            first, *rest = sentences(" ".join(paragraph)[len(indent) :])
            out.append(lead + first)
            out.extend(indent + line for line in rest)
        paragraph = []

    fenced = False
    for line in lines:
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        marker = MARKER.match(line)
        code = line.startswith("    ") and not paragraph and not marker
        if fence or fenced or code or not line.strip() or line.startswith(("|", "#", "<", "!", ">")):
            flush()
            out.append(line)
        elif marker:
            flush()
            paragraph, lead, indent = [line.rstrip()], marker[0], " " * len(marker[0])
        elif paragraph:
            paragraph.append(line.strip())
        else:
            lead = indent = line[: len(line) - len(line.lstrip())]
            paragraph = [line.rstrip()]
    flush()
    return out


def tracked(*patterns):
    """The files that git tracks."""
    return subprocess.run(["git", "ls-files", *patterns], capture_output=True, text=True, check=True).stdout.split()


def missing_paths():
    """Lines that name a file which is the tail of no tracked path. NAME, FAMILY and NN stand for any."""
    paths = ["/" + path for path in tracked()]
    # A file, and the heading from which on it is checked.
    for document, heading in [("CONTRIBUTING.md", "## Check-lists"), ("docs/architecture.md", "# How regard is built"), ("docs/backends.md", "# How each backend works")]:
        with open(document, encoding="utf-8") as file:
            lines = list(enumerate(file.read().splitlines(), 1))
        start = next(i for i, (_, line) in enumerate(lines) if line == heading)
        for number, line in lines[start:]:
            for name in NAMED.findall(line):
                any_name = re.search("NAME|FAMILY|NN", name)
                if not any_name and not any(path.endswith("/" + name) for path in paths):
                    yield f"{document}:{number}: there is no {name}"


def strange_examples():
    """Rust code of the two READMEs that is not the example at the head of the library, which the tests run."""
    library = "crates/regard/src/lib.rs"
    with open(library, encoding="utf-8") as file:
        tested = "\n".join(line.removeprefix("//!").removeprefix(" ") for line in file.read().splitlines() if line.startswith("//!"))
    for document in ["README.md", "crates/regard/README.md"]:
        with open(document, encoding="utf-8") as file:
            blocks = re.findall(r"```rust\n(.*?)```", file.read(), re.DOTALL)
        if not all(block.strip() in tested for block in blocks):
            yield f"{document}: an example is not that of {library}"


def main(arguments):
    fix = "--fix" in arguments
    files = [name for name in arguments if name != "--fix"]
    bad = 0
    if not files:
        files = tracked("*.md", *NOT_PROSE)
        for line in [*missing_paths(), *strange_examples()]:
            print(line)
            bad = 1
    for name in files:
        with open(name, encoding="utf-8") as file:
            before = file.read().splitlines()
        after = reflow(before)
        if before == after:
            continue
        if fix:
            with open(name, "w", encoding="utf-8") as file:
                file.write("\n".join(after) + "\n")
            continue
        line = next((n for n, (a, b) in enumerate(zip(before, after), 1) if a != b), min(len(before), len(after)) + 1)
        print(f"{name}:{line}: not one sentence per line; `scripts/markdown.py --fix` rewrites it")
        bad = 1
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
