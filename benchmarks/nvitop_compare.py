"""nvitop-exporter from PyPI, installed into a throw-away environment and started on the same stub driver."""

import subprocess
import sys
from pathlib import Path

PACKAGE = "nvitop-exporter"
ENVIRONMENT = Path(__file__).resolve().parents[1] / ".cache" / "bench-venv"
INSTALL_SECONDS = 180


def command(port: int) -> tuple[str, ...]:
    """Return the command that serves on ``port`` and samples once a second, its default."""
    return (str(ENVIRONMENT / "bin" / PACKAGE), "--bind-address", "127.0.0.1", "--port", str(port), "--interval", "1.0")


def install() -> str:
    """Install where missing; return "" when it can be started, else one line that says why not."""
    if (ENVIRONMENT / "bin" / PACKAGE).exists():
        return ""
    try:
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True, capture_output=True)
        subprocess.run(
            [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--quiet", PACKAGE],
            check=True,
            capture_output=True,
            timeout=INSTALL_SECONDS,
        )
    except subprocess.SubprocessError as error:
        return f"{PACKAGE} is not compared: pip could not install it ({type(error).__name__}); is an index at hand?"
    return ""


def version() -> str:
    """Return the installed version."""
    code = f"import importlib.metadata as m; print(m.version({PACKAGE!r}))"
    done = subprocess.run([str(ENVIRONMENT / "bin" / "python"), "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()
