"""What a cache says of itself, and its rows as a data source of grain."""

from lockstep.training import LmDataConfig
from tests.unit.training.data.characters import Tokenizer, write


def test_it_is_a_random_access_data_source(tmp_path):
    from grain import MapDataset

    urls = write(tmp_path / "x.jsonl", [{"text": letter * 3} for letter in "abcdef"])
    (cache,) = LmDataConfig(train_urls=urls, packing=False, max_seq_len=6).load(Tokenizer(), 16, 0).caches
    found = [row["tokens"].tolist() for row in MapDataset.source(cache).seed(0).shuffle()]
    assert sorted(found) == cache.take(range(6))["tokens"].tolist() != found


def test_the_digest_follows_the_rows(tmp_path):
    def digest(text, seed=0, **values):
        urls = write(tmp_path / f"{text}.jsonl", [{"text": text}] * 3)
        rows = LmDataConfig(**({"train_urls": urls, "max_seq_len": 8} | values)).load(Tokenizer(), 16, seed)
        return rows.digest()

    assert digest("ab") == digest("ab")
    assert len({digest("ab"), digest("ac"), digest("ab", seed=1), digest("ab", shuffle=False)}) == 4
    assert digest("ab", max_seq_len=7) != digest("ab")
