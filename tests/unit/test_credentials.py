"""What is hidden of names and URLs."""

import pytest

from lockstep.credentials import SECRET_NAME, hide_credentials, without_credentials


@pytest.mark.parametrize("name", ["HF_TOKEN", "HF_AUTH", "WANDB_PASSWD", "wandb_api_key", "AWS_SECRET", "CREDENTIALS"])
def test_secret_names(name):
    assert SECRET_NAME.search(name) and not SECRET_NAME.search("WANDB_MODE")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:hush@host/a/b", "https://host/a/b"),
        ("see https://h/a?sig=hush&x=1, and s3://k:hush@b/c.", "see https://h/a?… and s3://b/c."),
        ("az://c/part-?.jsonl", "az://c/part-?.jsonl"),
        ("hf://datasets/a/b@main/c", "hf://datasets/a/b@main/c"),
        ("'https://h/?token=hush'", "'https://h/?…'"),
        ("a@b.c is no URL?x=y", "a@b.c is no URL?x=y"),
    ],
)
def test_urls_lose_user_and_query(text, shown):
    assert without_credentials(text) == shown


def test_all_texts_of_a_configuration_lose_them():
    given = {"a": ["https://u:p@h/x", 1, None, True], "b": {"c": "gs://b/x"}}
    assert hide_credentials(given) == {"a": ["https://h/x", 1, None, True], "b": {"c": "gs://b/x"}}
