"""Training files."""

import pytest

from lockstep.errors import ConfigError
from lockstep.training import LmDataConfig
from tests.unit.training.test_data import Tokenizer, write


@pytest.mark.parametrize(
    ("record", "data_format", "text"),
    [
        ({"prompt": "a"}, "prompt_completion", r"x.jsonl:1 has no field 'completion'"),
        ({"prompt": "a", "completion": 3}, "prompt_completion", r"'completion' is 3, which is not a str"),
        ({"prompt": "a"}, "text", "no field 'text'.*data.format"),
        ({"messages": [{"role": "user", "content": "x"}]}, "chat", "ends with role 'user'"),
        ([1], "text", "JSON list, not an object"),
    ],
)
def test_wrong_records(tmp_path, record, data_format, text):
    config = LmDataConfig(train_urls=write(tmp_path / "x.jsonl", [record]), format=data_format)
    with pytest.raises(ConfigError, match=text):
        config.load(Tokenizer(), 16, 0)


def test_missing_files_and_no_files(tmp_path):
    with pytest.raises(ConfigError, match=r"none.jsonl.*Check data.train_urls"):
        LmDataConfig(train_urls=(str(tmp_path / "none.jsonl"),)).load(Tokenizer(), 16, 0)
    with pytest.raises(ConfigError, match="train_urls is empty"):
        LmDataConfig().load(Tokenizer(), 16, 0)
