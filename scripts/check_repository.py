"""Holds what no linter holds: sizes of modules and functions, and nothing of one machine in the tree."""

import ast
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULE_LINES = 600
FUNCTION_LINES = 50
ADDRESS = re.compile(r"https?://|--(?:extra-)?index-url|--find-links|--trusted-host")


def tracked() -> list[Path]:
    """Files that git knows and that exist, relative to the root of the repository."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in listing.split("\0") if name and (ROOT / name).is_file()]


def oversized(path: Path) -> Iterator[str]:
    """Say which module or function of ``path`` is longer than it may be."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.count("\n")
    if lines >= MODULE_LINES:
        yield f"{path}: {lines} lines; a module has fewer than {MODULE_LINES}: split it at a second reason to change"
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length >= FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines; allowed are fewer than {FUNCTION_LINES}"


def machine_words() -> list[str]:
    """Strings that would tie the tree to the machine that it was written on."""
    words = [str(ROOT)]
    host, home = socket.gethostname(), str(Path.home())
    if home != "/":
        words.append(f"{home}/")
    if re.search(r"\d", host):  # a generated name; "localhost" or "debian" may stand in any text
        words.append(host)
    return words


def strays(path: Path, words: list[str]) -> Iterator[str]:
    """Say which line of ``path`` names this machine, or in requirements any address."""
    try:
        text = (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    for number, line in enumerate(text.splitlines(), start=1):
        for word in words:
            if re.search(rf"(?<![\w}}.]){re.escape(word)}", line):
                yield f"{path}:{number}: names this machine ({word}); use a relative path or an argument"
        if path.parts[0] == "requirements" and ADDRESS.search(line):
            yield f"{path}:{number}: an index address; requirements carry versions and hashes only"


def main() -> int:
    """Print every finding; the exit code is 1 when there is one."""
    files = tracked()
    words = machine_words()
    findings = [line for path in files for line in strays(path, words)]
    findings += [
        line for path in files if path.parts[0] == "exporter" and path.suffix == ".py" for line in oversized(path)
    ]
    for line in findings:
        print(line)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
