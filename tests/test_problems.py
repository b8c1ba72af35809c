"""The log of problems with reports of the kubelet or the Kubernetes API."""

import logging

import pytest
from page_support import changed, snapshot

from exporter.agent.run import ProblemLog


def test_problem_is_logged_at_its_start_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "exporter.agent")
    log, well = ProblemLog(), snapshot()
    for words in ("", "HTTP 403", "HTTP 403", "HTTP 403; and more", "", "", "away"):
        log.note(changed(well, metadata={"problem": words}))
    log.note(changed(well, metadata={"problem": "away"}, attribution={"problem": "no socket"}))
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "Kubernetes API: HTTP 403"),
        ("INFO", "Kubernetes API: recovered"),
        ("WARNING", "Kubernetes API: away"),
        ("WARNING", "kubelet: no socket"),
    ]
