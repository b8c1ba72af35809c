"""Checks what no linter checks: sizes of modules, functions and trees, names of this machine, language of texts."""

import ast
import gc
import io
import re
import socket
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
MODULE_LINES = 600
FUNCTION_LINES = 50
CEILINGS = {"exporter": (137, 27_262), "simulator": (23, 5_656), "benchmarks": (34, 5_300)}
"""Modules and lines of code of a tree, ``__init__`` not counted. They only go down."""
LEAST_WORDS_RATIO = 0.17
"""Docstrings and comments per line of code in ``exporter``."""
DOCS_WORDS = 40_000
"""Words of README.md and docs/, without generated pages and tables, and without the runbook."""
NOT_COUNTED = frozenset(f"docs/{name}.md" for name in ("configuration", "metrics", "runbook"))
ADDRESS = re.compile(r"https?://|--(?:extra-)?index-url|--find-links|--trusted-host")

TEST_NAME_LENGTH = 80
NOT_IN_TEST_NAMES = frozenset(
    [
        "who",
        "whoever",
        "whose",
        "told",
        "tell",
        "tells",
        "anew",
        "mend",
        "mends",
        "beside",
        "whatever",
        "somebody",
        "says",
    ]
)
REPLACEMENTS = (
    (r"anew", "again"),
    (r"mend(?:s|ed|ing)?", "fix"),
    (r"clocks? that nobody sets", "monotonic clock"),
    (r"who holds", "holder"),
    (r"what is held", "held devices"),
    (r"nobody holds", "unheld, or no holder"),
    (r"(?:is|are|was|were|be) told", "is reported, is shown or is logged"),
    (r"tells? whether", "shows whether"),
    (r"tells? (?:nothing|none)", "reports none"),
    (r"(?:told|tells?) apart", "distinguish"),
    (r"stands? (?:apart|beside)", "is separate, or is next to"),
    (r"beside(?!-)", "in addition to, next to or with"),
    (r"go(?:es)? on", "continue"),
    (r"in one go", "at once"),
    (r"as of old|as ever", "as before"),
    (r"for ever", "permanently"),
    (r"looks? (?:at|after|for)", "check, read or search"),
    (r"lets? go of", "release"),
    (r"makes? way", "is closed, or yields"),
    (r"at hand", "available"),
    (r"(?<!there )(?-i:is none)", "unknown X, not 'X is none'"),
)
"""Expressions that read like a translation, and the plain words for them; ``is None`` of code is allowed."""
TEST_REPLACEMENTS = (
    (r"who(?:ever|m)?", "holder, owner, client or kubelet"),
    (r"nobody|somebody|someone", "no holder, no owner, or a user"),
    (r"told|tell(?:s|ing)?|says?", "report, show, log or return"),
    (r"whatever|all the same", "any, or still"),
)
"""Further expressions, in comments, docstrings and messages of assertions of ``TEST_FOLDERS``."""
TEST_FOLDERS = frozenset({"tests", "benchmarks"})
"""Their other strings are not checked: most are data."""
_TABLES = frozenset({"REPLACEMENTS", "TEST_REPLACEMENTS", "NOT_IN_TEST_NAMES"})
_VERBATIM = re.compile(r"```.*?```|`[^`\n]*`|\"[^\"\n]*\"|\]\([^)\n]*\)|^ {4,}\S.*?$", re.DOTALL | re.MULTILINE)
"""Code, quoted output and targets of links."""
_QUOTED_CODE = re.compile(r"``[^`\n]*``|`[^`\n]*`|\{[^{}\n]*\}")
"""Code in a comment, a docstring or a string, and the replacement fields of a string."""
TEXT_FOLDERS = (("deploy",), ("rules", "src"), ("scripts",), ("simulator",), (".ci",), ())
"""Folders of the checked texts other than Python and Markdown; the last one is the root."""
TEXT_SUFFIXES = frozenset({"", ".env", ".html", ".service", ".sh", ".tmpl", ".toml", ".tpl", ".txt", ".yaml"})


def tracked() -> list[Path]:
    """Return the existing files that git tracks, relative to the root of the repository."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in listing.split("\0") if name and (ROOT / name).is_file()]


@cache
def source_of(path: Path) -> str:
    """Return the text of a file, which is read once."""
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def tree_of(text: str) -> ast.Module:
    """Return the syntax tree of a module, which is parsed once."""
    return ast.parse(text)


def oversized(path: Path) -> Iterator[str]:
    """Report the module and the functions of ``path`` that exceed the limits."""
    text = source_of(path)
    lines = text.count("\n")
    if lines >= MODULE_LINES:
        yield f"{path}: {lines} lines; expected: fewer than {MODULE_LINES}; split it by responsibility"
    for node in ast.walk(tree_of(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length >= FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines; expected: fewer than {FUNCTION_LINES}"


def lines_of(path: Path) -> tuple[int, int]:
    """Return the number of lines of code of a module, and of docstrings and comments."""
    text = source_of(path)
    docstrings: set[int] = set()
    for node in ast.walk(tree_of(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code, comments = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.string.strip() and token.type != tokenize.ENDMARKER:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings), len(docstrings | (comments - code))


def overgrown(files: list[Path]) -> Iterator[str]:
    """Report the trees with more modules or code than their ceiling, or too few docstrings and comments."""
    for tree, (most_modules, most_code) in CEILINGS.items():
        modules = [path for path in files if path.parts[0] == tree and path.suffix == ".py"]
        sizes = [lines_of(path) for path in modules if path.name != "__init__.py"]
        code, words = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
        if len(sizes) > most_modules:
            yield f"{tree}/: {len(sizes)} modules; expected: at most {most_modules}; move code to an existing module"
        if code > most_code:
            yield f"{tree}/: {code} lines of code; expected: at most {most_code}; remove code"
        if tree == "exporter" and words < LEAST_WORDS_RATIO * code:
            yield f"{tree}/: {words} lines of docstrings and comments; expected: {LEAST_WORDS_RATIO:.0%} of the code"


def namesakes(files: list[Path]) -> Iterator[str]:
    """Report the public classes of ``exporter`` and ``simulator`` that share their name."""
    homes: dict[str, list[str]] = {}
    for path in files:
        if path.parts[0] in CEILINGS and path.parts[0] != "benchmarks" and path.suffix == ".py":
            for node in tree_of(source_of(path)).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(str(path))
    for name, paths in sorted(homes.items()):
        if len(paths) > 1:
            yield f"{', '.join(paths)}: class {name} is defined {len(paths)} times; rename all but one"


def machine_words() -> list[str]:
    """Return the strings that identify this machine: root of the tree, home directory, host name."""
    words = [str(ROOT)]
    host, home = socket.gethostname(), str(Path.home())
    if home != "/":
        words.append(f"{home}/")
    if re.search(r"\d", host):  # a generated name; "localhost" or "debian" can appear in any text
        words.append(host)
    return words


def strays(path: Path, words: list[str]) -> Iterator[str]:
    """Report the lines of ``path`` that name this machine, or contain an address in requirements."""
    try:
        text = source_of(path)
    except UnicodeDecodeError:
        return
    words = [word for word in words if word in text]
    if not words and path.parts[0] != "requirements":
        return
    for number, line in enumerate(text.splitlines(), start=1):
        for word in words:
            if re.search(rf"(?<![\w}}.]){re.escape(word)}", line):
                yield f"{path}:{number}: names this machine ({word}); use a relative path or an argument"
        if path.parts[0] == "requirements" and ADDRESS.search(line):
            yield f"{path}:{number}: an index address; expected: versions and hashes only; remove it"


@cache
def any_of(replacements: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    """Return the pattern of all expressions to replace."""
    return re.compile("|".join(rf"\b(?:{pattern})\b" for pattern, _ in replacements), re.IGNORECASE)


def stilted(
    text: str, verbatim: re.Pattern[str] = _VERBATIM, replacements: Iterable[tuple[str, str]] = REPLACEMENTS
) -> Iterator[tuple[int, str, str]]:
    """Yield line, expression and replacement for each expression of ``text`` that reads like a translation."""
    pairs = tuple(replacements)
    if not any_of(pairs).search(text):
        return
    prose = verbatim.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(prose.splitlines(), start=1):
        for pattern, plain in pairs:
            for match in re.finditer(rf"\b(?:{pattern})\b", line, re.IGNORECASE):
                yield number, match[0], plain


def messages(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Yield the places of docstrings and of the messages of assertions: line and column."""
    for node in ast.walk(tree):
        found = node.value if isinstance(node, ast.Expr) else node.msg if isinstance(node, ast.Assert) else None
        if isinstance(found, ast.Constant | ast.JoinedStr):
            yield found.lineno, found.col_offset


def spoken(text: str, *, with_data: bool = True) -> str:
    """Return the texts of a module on their lines: comments, docstrings and strings, without the tables of this check.

    Without data, the only strings are docstrings and the messages of assertions.
    """
    tree = tree_of(text)
    table: set[int] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in _TABLES:
            table.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    places = frozenset(messages(tree))
    strings = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    lines = [""] * (text.count("\n") + 1)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_text = token.type in strings and (with_data or token.start in places)
        if (is_text or token.type == tokenize.COMMENT) and token.start[0] not in table:
            for number, line in enumerate(token.string.split("\n"), start=token.start[0] - 1):
                lines[number] += f" {line}"
    return "\n".join(lines)


def is_text(path: Path) -> bool:
    """Return whether the language of a file other than Python and Markdown is checked."""
    folders = (path.parts[: len(folder)] == folder if folder else len(path.parts) == 1 for folder in TEXT_FOLDERS)
    return path.suffix in TEXT_SUFFIXES and any(folders)


def language(path: Path) -> Iterator[str]:
    """Report the expressions to replace in a page, in the texts of a module, or in another text."""
    text = source_of(path)
    in_tests = path.suffix == ".py" and path.parts[0] in TEST_FOLDERS
    replacements = (*REPLACEMENTS, *TEST_REPLACEMENTS) if in_tests else REPLACEMENTS
    if not any_of(replacements).search(text):
        return
    if path.suffix == ".py":
        text = spoken(text, with_data=not in_tests)
    found = stilted(text, _VERBATIM if path.suffix == ".md" else _QUOTED_CODE, replacements)
    for number, words, plain in found:
        yield f'{path}:{number}: "{words}": write {plain}'


def unreadable(path: Path) -> Iterator[str]:
    """Report the names of tests that are too long, or in words that the language check refuses."""
    for number, line in enumerate(source_of(path).splitlines(), start=1):
        if found := re.match(r"\s*(?:async )?def (test_\w+)", line):
            name = found[1]
            if len(name) > TEST_NAME_LENGTH:
                yield f"{path}:{number}: {name}: {len(name)} characters; at most {TEST_NAME_LENGTH}"
            for word in sorted(NOT_IN_TEST_NAMES & set(name.split("_"))):
                yield f"{path}:{number}: {name}: '{word}'; write test_<subject>_<behaviour> in plain words"


def words_of(page: str) -> int:
    """Return the number of words of a page: a word has a letter or digit; generated tables do not count."""
    written = re.sub(r"<!-- generated: .*?<!-- end -->", "", page, flags=re.DOTALL)
    return sum(1 for word in written.split() if re.search(r"[^\W_]", word))


def wordy(pages: list[Path]) -> Iterator[str]:
    """Report a documentation that is longer than its ceiling."""
    counted = [page for page in pages if page.as_posix() not in NOT_COUNTED]
    total = sum(words_of(source_of(page)) for page in counted)
    if total > DOCS_WORDS:
        yield f"docs/: {total} words; expected: at most {DOCS_WORDS}; shorten pages, or move results to benchmarks"


def read_yaml(path: Path) -> Any:  # noqa: ANN401 - YAML of any shape
    """Return the document of a file."""
    return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506


def unproven(root: Path) -> Iterator[str]:
    """Report the alerts without a heading in the runbook, or without a test in which they fire or are silent."""
    rules = read_yaml(root / "rules" / "prometheus-rules.yaml")
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    runbook = (root / "docs" / "runbook.md").read_text(encoding="utf-8")
    fires, silent = set(), set()
    for path in sorted((root / "tests" / "rules").glob("*.yaml")):
        for test in read_yaml(path)["tests"]:
            for one in test.get("alert_rule_test", ()):
                (fires if one.get("exp_alerts") else silent).add(one["alertname"])
    headings = set(re.findall(r"^#+ (\w+)$", runbook, re.MULTILINE))
    for alert in sorted(alerts):
        for there, what in (
            (headings, "docs/runbook.md has no heading with its name; add one"),
            (fires, "no test of tests/rules/ in which it fires; add one"),
            (silent, "no test of tests/rules/ in which it is silent; add one"),
        ):
            if alert not in there:
                yield f"rules/prometheus-rules.yaml: {alert}: {what}"


def main() -> int:
    """Print every finding; exit code 1 for a finding."""
    gc.disable()  # all syntax trees stay until the end: to search them again and again took 45 % of the time
    files = tracked()
    words = machine_words()
    findings = [line for path in files for line in strays(path, words)]
    findings += [
        line for path in files if path.parts[0] == "exporter" and path.suffix == ".py" for line in oversized(path)
    ]
    findings += overgrown(files)
    findings += namesakes(files)
    pages = [path for path in files if path.suffix == ".md" and (path.parts[0] == "docs" or path == Path("README.md"))]
    modules = [path for path in files if path.suffix == ".py"]
    manuals = [
        path for path in files if path.suffix == ".md" and path.parts[0] in {"contrib", "deploy", "CONTRIBUTING.md"}
    ]
    texts = [*pages, *manuals, *modules, *filter(is_text, files)]
    findings += [line for path in texts for line in language(path)]
    tests = [path for path in files if path.parts[0] == "tests" and path.name.startswith("test_")]
    findings += [line for path in tests if path.suffix == ".py" for line in unreadable(path)]
    findings += wordy(pages)
    findings += unproven(ROOT)
    for line in findings:
        print(line)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
