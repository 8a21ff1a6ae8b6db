"""A cloud of fake hosts for each test."""

import pytest

from tests.fake_cloud import gcloud
from tests.fake_cloud import google_cloud as google
from tests.fake_cloud.cloud import Cloud


@pytest.fixture
def cloud(tmp_path):
    made = Cloud(tmp_path / "cloud")
    yield made
    made.close()


@pytest.fixture
def google_cloud(tmp_path, monkeypatch):
    """gcloud in this process; tests/unit/launch/test_google.py has it as a command."""
    monkeypatch.setenv("FAKE_GOOGLE", str(tmp_path / "cloud"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("lockstep.launch.tool.subprocess.run", gcloud.run)
    return google.Cloud(tmp_path / "cloud")
