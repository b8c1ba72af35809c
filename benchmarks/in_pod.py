"""Runs the agent as in a pod with a service account in a folder: ``in_pod.py FOLDER python -m exporter agent ...``."""

import sys
from pathlib import Path

from exporter.kube import credentials

if __name__ == "__main__":
    # A pod has this folder at a path that only root can create here. The command line imports the modules that use it.
    credentials.SERVICE_ACCOUNT = Path(sys.argv[1])
    del sys.argv[1:5]
    from exporter.cli import main

    sys.exit(main())
