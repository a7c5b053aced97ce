"""Fixtures that several tests of the engine share."""

import pytest


@pytest.fixture
def said(monkeypatch):
    """What was logged once; vLLM takes handlers away when it configures logging."""
    from vllm import logger

    records: list[str] = []
    for once in ("_print_info_once", "_print_warning_once"):
        monkeypatch.setattr(logger, once, lambda _, text, *args: records.append(text % args))
    return records
