"""Runs the command line as in a pod whose service account lies elsewhere: ``in_pod.py FOLDER agent ...``."""

import sys
from pathlib import Path

from exporter.kube import credentials

if __name__ == "__main__":
    # A pod has it in a folder that only root could make here. Those who use it are imported by the command line.
    credentials.SERVICE_ACCOUNT = Path(sys.argv.pop(1))
    from exporter.cli import main

    sys.exit(main())
