"""A cloud of fake hosts for each test."""

import pytest

from tests.fake_cloud.cloud import Cloud


@pytest.fixture
def cloud(tmp_path):
    made = Cloud(tmp_path / "cloud")
    yield made
    made.close()
