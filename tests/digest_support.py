"""The program in contrib/digest, as a module."""

import importlib.util
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent.parent / "contrib" / "digest" / "digest.py"
_SPEC = importlib.util.spec_from_file_location("contrib_digest", PROGRAM)
assert _SPEC is not None
assert _SPEC.loader is not None
digest = importlib.util.module_from_spec(_SPEC)
sys.modules["contrib_digest"] = digest  # dataclasses look their module up
_SPEC.loader.exec_module(digest)
