"""Check what no linter checks: sizes of modules, functions and trees, names of this machine, language of the docs."""

import ast
import io
import re
import socket
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
MODULE_LINES = 600
FUNCTION_LINES = 50
CEILINGS = {"exporter": (137, 28_295), "simulator": (24, 5_667), "benchmarks": (34, 6_558)}
"""Modules and lines of code of a tree, ``__init__`` not counted. They only go down."""
LEAST_WORDS_RATIO = 0.17
"""Docstrings and comments per line of code in ``exporter``."""
DOCS_WORDS = 40_000
"""Words of README.md and docs/, without what is generated and the runbook: one section for each alert."""
NOT_COUNTED = frozenset(f"docs/{name}.md" for name in ("configuration", "metrics", "runbook"))
ADDRESS = re.compile(r"https?://|--(?:extra-)?index-url|--find-links|--trusted-host")

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
    (r"beside", "in addition to, next to or with"),
    (r"go(?:es)? on", "continue"),
    (r"in one go", "at once"),
    (r"as of old|as ever", "as before"),
    (r"for ever", "permanently"),
    (r"looks? (?:at|after|for)", "check, read or search"),
    (r"lets? go of", "release"),
    (r"makes? way", "is closed, or yields"),
    (r"at hand", "available"),
    (r"is none", "unknown X, not 'X is none'"),
)
"""Expressions that read like a translation, and the plain words for them."""
_VERBATIM = re.compile(r"```.*?```|`[^`\n]*`|\"[^\"\n]*\"|\]\([^)\n]*\)|^ {4,}\S.*?$", re.DOTALL | re.MULTILINE)
"""Code, quoted output and targets of links."""


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


def lines_of(path: Path) -> tuple[int, int]:
    """Return how many lines of a module are code, and how many are docstrings or comments."""
    text = (ROOT / path).read_text(encoding="utf-8")
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
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
    """Say which tree has more modules or code than its ceiling, or too few words of explanation."""
    for tree, (most_modules, most_code) in CEILINGS.items():
        modules = [path for path in files if path.parts[0] == tree and path.suffix == ".py"]
        sizes = [lines_of(path) for path in modules if path.name != "__init__.py"]
        code, words = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
        if len(sizes) > most_modules:
            yield f"{tree}/: {len(sizes)} modules; at most {most_modules}: put it into the module of its subject"
        if code > most_code:
            yield f"{tree}/: {code} lines of code; at most {most_code}: remove as much as you add"
        if tree == "exporter" and words < LEAST_WORDS_RATIO * code:
            yield f"{tree}/: {words} lines of docstrings and comments; at least {LEAST_WORDS_RATIO:.0%} of the code"


def namesakes(files: list[Path]) -> Iterator[str]:
    """Report the public classes of ``exporter`` and ``simulator`` that share their name."""
    homes: dict[str, list[str]] = {}
    for path in files:
        if path.parts[0] in CEILINGS and path.parts[0] != "benchmarks" and path.suffix == ".py":
            for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(str(path))
    for name, paths in sorted(homes.items()):
        if len(paths) > 1:
            yield f"{', '.join(paths)}: class {name} is there {len(paths)} times; give each a name of its own"


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


def stilted(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, expression and replacement for each expression of ``text`` that reads like a translation."""
    prose = _VERBATIM.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(prose.splitlines(), start=1):
        for pattern, plain in REPLACEMENTS:
            for match in re.finditer(rf"\b(?:{pattern})\b", line, re.IGNORECASE):
                yield number, match[0], plain


def language(path: Path) -> Iterator[str]:
    """Report the expressions to replace in a page of the documentation."""
    for number, words, plain in stilted((ROOT / path).read_text(encoding="utf-8")):
        yield f'{path}:{number}: "{words}": write {plain}'


def words_of(page: str) -> int:
    """Return the number of words of a page: a word has a letter or digit; generated tables do not count."""
    written = re.sub(r"<!-- generated: .*?<!-- end -->", "", page, flags=re.DOTALL)
    return sum(1 for word in written.split() if re.search(r"[^\W_]", word))


def wordy(pages: list[Path]) -> Iterator[str]:
    """Report a documentation that is longer than its ceiling."""
    counted = [page for page in pages if page.as_posix() not in NOT_COUNTED]
    total = sum(words_of((ROOT / page).read_text(encoding="utf-8")) for page in counted)
    if total > DOCS_WORDS:
        yield f"docs/: {total} words; at most {DOCS_WORDS}: remove repetition, or move results to benchmarks/results"


def unproven(root: Path) -> Iterator[str]:
    """Report the alerts without a heading in the runbook, or without a test in which they fire or stay silent."""
    rules = yaml.safe_load((root / "rules" / "prometheus-rules.yaml").read_text(encoding="utf-8"))
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    runbook = (root / "docs" / "runbook.md").read_text(encoding="utf-8")
    fires, silent = set(), set()
    for path in sorted((root / "tests" / "rules").glob("*.yaml")):
        for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            for one in test.get("alert_rule_test", ()):
                (fires if one.get("exp_alerts") else silent).add(one["alertname"])
    headings = set(re.findall(r"^#+ (\w+)$", runbook, re.MULTILINE))
    for alert in sorted(alerts):
        for there, what in (
            (headings, "docs/runbook.md has no heading of its name"),
            (fires, "no test of tests/rules/ in which it fires"),
            (silent, "no test of tests/rules/ in which it is silent"),
        ):
            if alert not in there:
                yield f"rules/prometheus-rules.yaml: {alert}: {what}"


def main() -> int:
    """Print every finding; the exit code is 1 when there is one."""
    files = tracked()
    words = machine_words()
    findings = [line for path in files for line in strays(path, words)]
    findings += [
        line for path in files if path.parts[0] == "exporter" and path.suffix == ".py" for line in oversized(path)
    ]
    findings += overgrown(files)
    findings += namesakes(files)
    pages = [path for path in files if path.suffix == ".md" and (path.parts[0] == "docs" or path == Path("README.md"))]
    findings += [line for path in pages for line in language(path)]
    findings += wordy(pages)
    findings += unproven(ROOT)
    for line in findings:
        print(line)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
