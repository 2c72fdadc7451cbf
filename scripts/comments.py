#!/usr/bin/env python3
"""Checks that no line of Rust is wider than 100 columns; with --write, wraps comments that are.

rustfmt breaks code at 100 columns and leaves comments and string literals alone. Tables, code
blocks, headings and lines of one word are not wrapped. Lines that only a person can break (strings,
comments behind code) are listed.
"""
import re
import subprocess
import sys

WIDTH = 100
COMMENT = re.compile(r"^(\s*)(///|//!|//)( ?)(.*)$")
ITEM = re.compile(r"^(\s*)([-*]|\d+\.) ")
# Arguments in the documentation of a Python function: a name or more, and their meaning.
ARGUMENT = re.compile(r"[a-z_]+(, [a-z_]+)*: ")
# Words that at the start of a line would make it a list item, a heading, a rule, a table or a quote.
STRUCTURE = re.compile(r"([*+]|-+|=+|\d+[.)])$|[#|>]")


def words_of(text):
    """The words of a paragraph; one that cannot start a line stays with the word before it."""
    words = []
    for word in text.split():
        if words and STRUCTURE.match(word):
            words[-1] += " " + word
        else:
            words.append(word)
    return words


def wrap(prefix, lines):
    """The lines of one paragraph, wrapped; the first may be a list item or an argument."""
    item = ITEM.match(lines[0])
    first = item.group(0) if item else re.match(r"\s*", lines[0]).group(0)
    rest = " " * (4 if ARGUMENT.match(lines[0]) else len(first))
    out, current = [], ""
    for word in words_of(" ".join([lines[0][len(first):], *lines[1:]])):
        start = prefix + (rest if out else first)
        if current and len(start + current + " " + word) > WIDTH:
            out.append(start + current)
            current = word
        else:
            current = f"{current} {word}" if current else word
    return out + [prefix + (rest if out else first) + current]


def wrap_block(prefix, lines):
    """The lines of one comment; only paragraphs that have a wide line change."""
    out, paragraph, fenced = [], [], False

    def flush():
        if paragraph:
            wide = any(len(prefix + line) > WIDTH for line in paragraph)
            out.extend(wrap(prefix, paragraph) if wide else [prefix + line for line in paragraph])
            paragraph.clear()

    for line in lines:
        text = line.strip()
        verbatim = fenced or text.startswith(("```", "|", "#", "cbindgen:")) or not text
        if verbatim or re.match(r" {4,}", line) and not paragraph:
            flush()
            out.append((prefix + line).rstrip())
            fenced ^= text.startswith("```")
            continue
        begins = ITEM.match(line) or re.match(r"\[.*\]: |SAFETY:", text)
        if begins or paragraph and ARGUMENT.match(paragraph[0]) and ARGUMENT.match(line):
            flush()
        paragraph.append(line)
    flush()
    return out


def wrapped(source):
    """A file with its wide comments wrapped."""
    out, block, key = [], [], None

    def flush():
        nonlocal key
        if block:
            out.extend(wrap_block(key, block))
            block.clear()
        key = None

    for line in source.split("\n"):
        found = COMMENT.match(line)
        if not found:
            flush()
            out.append(line)
            continue
        prefix = found.group(1) + found.group(2) + " "
        if key != prefix:
            flush()
            key = prefix
        block.append(found.group(4))
    flush()
    return "\n".join(out)


def main():
    write = "--write" in sys.argv[1:]
    files = subprocess.run(["git", "ls-files", "*.rs"], check=True, capture_output=True, text=True)
    wide = 0
    for path in files.stdout.split():
        # Generated, a line per image.
        if path.endswith("images/index.rs"):
            continue
        with open(path, encoding="utf-8") as file:
            source = file.read()
        if write:
            changed = wrapped(source)
            if changed != source:
                source = changed
                with open(path, "w", encoding="utf-8") as file:
                    file.write(source)
        for number, line in enumerate(source.split("\n"), 1):
            if len(line) > WIDTH:
                print(f"{path}:{number}: {len(line)} columns")
                wide += 1
    if wide:
        print(f"{wide} lines wider than {WIDTH} columns; scripts/comments.py --write wraps comments")
    return 1 if wide else 0


if __name__ == "__main__":
    sys.exit(main())
