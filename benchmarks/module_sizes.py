"""What each package's modules take by themselves, in bytes as JSON: ``module_sizes.py MODULE...``."""

# Little is imported here, for what is here already is not counted.
import importlib._bootstrap
import sys
import tracemalloc

_load = importlib._bootstrap._load_unlocked  # type: ignore[attr-defined] # noqa: SLF001 - sees every import
_taken: dict[str, int] = {}
_inner: list[int] = []


def _counted(spec):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - the import system's own types
    before = tracemalloc.get_traced_memory()[0]
    _inner.append(0)
    try:
        return _load(spec)
    finally:
        whole = tracemalloc.get_traced_memory()[0] - before
        package = spec.name.partition(".")[0]
        _taken[package] = _taken.get(package, 0) + whole - _inner.pop()
        if _inner:
            _inner[-1] += whole


if __name__ == "__main__":
    importlib._bootstrap._load_unlocked = _counted  # type: ignore[attr-defined] # noqa: SLF001 - as above
    tracemalloc.start()
    for module in sys.argv[1:]:
        __import__(module)
    print(str(_taken).replace("'", '"'))
