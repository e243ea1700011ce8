from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.errors import UsageError
from burnish.files.urls import Url, is_url


@pytest.mark.parametrize(
    ("text", "scheme", "host", "path"),
    [
        ("s3://bucket", "s3", "bucket", ""),
        ("s3://bucket/", "s3", "bucket", ""),
        ("S3://bucket/a b/c%20d#e?f/", "s3", "bucket", "a b/c%20d#e?f"),
        ("gs://bucket/a//b//", "gs", "bucket", "a//b"),
        ("hdfs://nn.example:8020/user/me", "hdfs", "nn.example:8020", "user/me"),
        ("hdfs:///user/me", "hdfs", "", "user/me"),
        ("file:///tmp/a b", "file", "", "tmp/a b"),
        ("file://localhost/tmp", "file", "", "tmp"),
        ("memory://a/b", "memory", "", "a/b"),
    ],
)
def test_taking_apart(text: str, scheme: str, host: str, path: str) -> None:
    url = Url.parse(text)
    assert (url.scheme, url.host, url.path) == (scheme, host, path)
    assert Url.parse(str(url)) == url


@pytest.mark.parametrize(
    "text",
    [
        "http://host/file",
        "hf://model",
        "s3:///key",
        "file://host/share",
        "s3://bucket/a/../b",
        "hdfs://host/./b",
    ],
)
def test_what_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Url.parse(text)


def test_credentials_are_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        Url.parse("s3://AKIAKEY:hunter2@bucket/path")
    assert "hunter2" not in str(caught.value)
    assert "bucket/path" in str(caught.value)


@pytest.mark.parametrize("text", ["runs", "/a/b", "~/a", "a:b", "C:/x", "module:function", "://x"])
def test_paths_are_no_urls(text: str) -> None:
    assert not is_url(text)


@given(st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), min_size=1))
def test_going_down_and_up_again(name: str) -> None:
    url = Url.parse("s3://bucket/a")
    if name in (".", ".."):
        return
    below = url.below(name)
    assert below.parent == url
    assert below.name == name
    assert url.below("") == url
