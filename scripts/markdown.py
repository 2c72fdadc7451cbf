#!/usr/bin/env python3
"""Checks that Markdown has one sentence per line, outside of tables and code: `scripts/markdown.py [FILE...]`.

Without files it takes every Markdown file that git tracks. `--fix` rewrites the files instead."""

import re
import subprocess
import sys

# Tables that programs print, and the history.
NOT_PROSE = [":!bench/results/*/table.md", ":!CHANGELOG.md"]
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


def main(arguments):
    fix = "--fix" in arguments
    files = [name for name in arguments if name != "--fix"]
    files = files or subprocess.run(["git", "ls-files", "*.md", *NOT_PROSE], capture_output=True, text=True, check=True).stdout.split()
    bad = 0
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
